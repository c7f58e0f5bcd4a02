"""Tensors that are views of mapped files, as a source."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta


class Views:
    """Tensors by name, read from their files when a region of them is looked at."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, str]] = {}

    def add(self, name: str, value: torch.Tensor, where: str) -> None:
        """Add a tensor; `where` it is, for messages."""
        self._tensors[name] = value.detach(), where

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        value = self._tensors[name][0]
        return TensorMeta(tuple(value.shape), value.dtype)

    def where(self, name: str) -> str:
        """Return the file that a tensor is in."""
        return self._tensors[name][1]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) as a new tensor; ValueError when it leaves the tensor."""
        value = self._tensors[name][0]
        whole = Box.whole(tuple(value.shape))
        box = whole if box is None else box
        if len(box.shape) != len(whole.shape) or not whole.contains(box):
            raise ValueError(f"{name}: region {box} leaves the shape {list(value.shape)}")
        return value[box.slices].clone(memory_format=torch.contiguous_format)

"""A DCP folder as a source of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.dcp.metadata import DcpTensor, Stored, read_metadata
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.memory import new_tensor
from mcore_ckpt.torchfile import Mapped, load_archive
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta


class DcpFolder:
    """The tensors and objects of a folder that `torch.distributed.checkpoint` has written.

    Opening reads `.metadata` alone. Files are mapped into memory while a region is copied out of
    them. Nothing in them is run: an object that names what is not known to be a value is refused.

    Raises:
        FileNotFoundError: there is no `.metadata`.
        CheckpointError: it is damaged; names the file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._metadata = read_metadata(self.folder)
        self._files: dict[str, Mapped] = {}
        self._last: tuple[Stored, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata.tensors)

    def __len__(self) -> int:
        return len(self._metadata.tensors)

    @property
    def objects(self) -> Sequence[str]:
        """The names of what is no tensor."""
        return tuple(self._metadata.objects)

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        return self._metadata.tensors[name].meta

    def chunks(self, name: str) -> Sequence[Box]:
        """Return the regions that a tensor is stored in; KeyError when there is none."""
        return tuple(self._metadata.tensors[name].chunks)

    def where(self, name: str) -> str:
        """Return the file that a tensor, or the first part of it, is in."""
        for stored in self._metadata.tensors[name].chunks.values():
            return str(self.folder / stored.file)
        return str(self.folder)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) as a new CPU tensor, bit for bit.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the region leaves the tensor.
            CheckpointError: part of it is stored nowhere, or a file is missing or damaged.
        """
        tensor = self._metadata.tensors[name]
        whole = Box.whole(tensor.meta.shape)
        box = whole if box is None else box
        if len(box.shape) != len(whole.shape) or not whole.contains(box):
            raise ValueError(f"{name}: region {box} leaves the shape {list(tensor.meta.shape)}")
        what = f"{self.folder}: {name} {list(box.shape)}"
        result = new_tensor(box.shape, tensor.meta.dtype, what)
        covered = 0
        for chunk, common in _common(tensor, box):
            value = self._chunk(name, chunk, tensor)
            result[_inside(common, box)] = value[_inside(common, chunk)]
            covered += common.numel
        if covered < box.numel:
            raise CheckpointError(
                f"{self.folder}: of {name} {box} only {covered} of {box.numel} elements are stored"
            )
        return result

    def object(self, name: str) -> Any:
        """Return what is no tensor; KeyError when there is none, CheckpointError as `read`."""
        return self._load(name, self._metadata.objects[name])

    def _chunk(self, name: str, chunk: Box, tensor: DcpTensor) -> torch.Tensor:
        stored = tensor.chunks[chunk]
        if self._last is not None and self._last[0] == stored:
            return self._last[1]  # several regions of a chunk in a row; it is a view of the file
        value = self._load(name, stored)
        wanted = chunk.shape, tensor.meta.dtype
        if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != wanted:
            raise CheckpointError(
                f"{self.folder / stored.file}: {name} {chunk} is not the {tensor.meta.dtype} of "
                f"shape {list(chunk.shape)} that .metadata says"
            )
        self._last = stored, value
        return value

    def _load(self, name: str, stored: Stored) -> Any:
        if stored.file not in self._files:
            self._files[stored.file] = Mapped(self.folder / stored.file)
        mapped = self._files[stored.file]
        stop = stored.offset + stored.num_bytes
        return load_archive(mapped, stored.offset, stop, f"{mapped.path}: {name}")


def _common(tensor: DcpTensor, box: Box) -> Iterator[tuple[Box, Box]]:
    for chunk in tensor.chunks:
        common = chunk.intersect(box)
        if common is not None:
            yield chunk, common


def _inside(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(
        slice(a - b, a - b + n) for a, b, n in zip(part.start, whole.start, part.shape, strict=True)
    )

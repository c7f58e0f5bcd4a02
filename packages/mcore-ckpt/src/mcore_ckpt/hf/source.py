"""A folder of safetensors files as a source of tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_ckpt.dtypes import from_numpy, stored_type
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.hf.format import Entry, read_header
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class _Place:
    path: Path
    entry: Entry


class SafetensorsFolder:
    """The tensors of `model.safetensors`, or of the files in `model.safetensors.index.json`.

    `single` is another name in place of the first. Opening reads the headers alone. Files are
    mapped into memory while a region is copied out of them, so that of a region of a few columns,
    too, only its own pages are read.

    Raises:
        FileNotFoundError: neither of the two is there.
        CheckpointError: a file is missing or damaged, or index and files differ; names the file,
            the tensor or the field.
    """

    def __init__(self, folder: str | os.PathLike[str], *, single: str = SINGLE) -> None:
        self.folder = Path(folder)
        self._places: dict[str, _Place] = {}
        file, index = self.folder / single, self.folder / INDEX
        if file.is_file():
            self._add(file)
        elif index.is_file():
            self._add_all(index)
        else:
            raise FileNotFoundError(f"{self.folder} has neither {single} nor {INDEX}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def meta(self, name: str) -> TensorMeta:
        """Return a tensor's shape and dtype; KeyError when there is none."""
        return self._places[name].entry.meta

    def where(self, name: str) -> str:
        """Return the file that a tensor is in."""
        return str(self._places[name].path)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a region (default: all) as a new CPU tensor, bit for bit.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the region leaves the tensor.
            CheckpointError: the file is not there any more, or shorter.
        """
        place = self._places[name]
        meta = place.entry.meta
        whole = Box.whole(meta.shape)
        box = whole if box is None else box
        if len(box.shape) != len(whole.shape) or not whole.contains(box):
            raise ValueError(f"{name}: region {box} leaves the shape {list(meta.shape)}")
        stored = stored_type(meta.dtype)
        if not box.numel:
            return torch.empty(box.shape, dtype=meta.dtype)
        try:
            elements = np.memmap(
                place.path,
                dtype=np.dtype(stored.zarr),
                mode="r",
                offset=place.entry.offset,
                shape=meta.shape,
            )
        except (OSError, ValueError) as error:  # it was whole when it was opened
            raise CheckpointError(f"{place.path}: {name} cannot be read: {error}") from None
        return from_numpy(np.array(elements[box.slices], order="C"), stored.name)

    def _add(self, path: Path) -> None:
        for name, entry in read_header(path).items():
            if name in self._places:
                raise CheckpointError(f"{name} is in {self._places[name].path} and in {path}")
            self._places[name] = _Place(path=path, entry=entry)

    def _add_all(self, index: Path) -> None:
        listed = _weight_map(index)
        for file in sorted(set(listed.values())):
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, which {index} lists")
            self._add(path)
        for name, file in listed.items():
            if name not in self._places or self._places[name].path.name != file:
                raise CheckpointError(
                    f"{index} says that {name} is in {file}, which has no such tensor"
                )


def _weight_map(index: Path) -> dict[str, str]:
    document: Any = read_json(index)
    listed = document.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is {listed!r}, not an object of tensors")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map of {name} is {file!r}, not a file beside it"
            )
    return dict(listed)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError when there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return document

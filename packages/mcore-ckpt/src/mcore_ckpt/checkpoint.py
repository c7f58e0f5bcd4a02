"""Reading a checkpoint without a layout: by name, one whole tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mcore_ckpt.addresses import Place
from mcore_ckpt.commit import read_manifest, resolve
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.engine import Engine
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import Manifest, TensorInfo, sha256
from mcore_ckpt.memory import new_tensor
from mcore_ckpt.names import FILES
from mcore_ckpt.reading import Part, Reader, inside
from mcore_ckpt.storage import Readable
from mcore_parallel.layout import Box


class Checkpoint(Mapping[str, torch.Tensor]):
    """The global tensors of a committed checkpoint by name, read from disk when asked for.

    `checkpoint["model/embedding.weight"]` is a new CPU tensor of the real dtype, every chunk of it
    compared with its checksum. `info(name)` tells dtype and shape without reading.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        engine: Engine | None = None,
        storage: Readable | None = None,
    ) -> None:
        """Open `path`, as `mcore_ckpt.open` does."""
        located = resolve(path, storage)
        self._storage, self._name, self._place = located.storage, located.name, located.place
        self._manifest = read_manifest(self._storage, self._name)
        if engine is None:
            from mcore_ckpt.default_engine import DefaultEngine

            engine = DefaultEngine()
        self._engine = engine

    @property
    def path(self) -> Place:
        """The checkpoint's own directory, a path or an address."""
        return self._place

    @property
    def manifest(self) -> Manifest:
        """Everything the checkpoint says about itself."""
        return self._manifest

    @property
    def step(self) -> int:
        """The training step it was saved at."""
        return self._manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """What was saved that is no tensor."""
        return dict(self._manifest.state)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and chunks of a tensor; KeyError when there is none."""
        return self._manifest.tensors[name]

    def read(self, name: str, box: Box | None = None, *, verify: bool = True) -> torch.Tensor:
        """Return part of a tensor (default: all of it) as a new CPU tensor of the real dtype.

        verify: compare every chunk that is read with its checksum.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the box leaves the tensor.
            CheckpointError: a chunk is missing, unreadable or damaged; names it and its file.
        """
        info = self.info(name)
        whole = Box.whole(info.shape)
        box = whole if box is None else box
        if len(box.shape) != len(whole.shape) or not whole.contains(box):
            raise ValueError(f"{name}: box {box} leaves the shape {list(info.shape)}")
        what = f"{self._place}: tensor {name} {list(box.shape)}"
        result = new_tensor(box.shape, stored_type(info.dtype).torch, what)
        parts = []
        for number in info.grid.overlapping(box):
            common = info.grid.box(number).intersect(box)
            assert common is not None
            parts.append(Part(name=name, number=number, box=common))
        reader = Reader(
            storage=self._storage,
            checkpoint=self._name,
            manifest=self._manifest,
            engine=self._engine,
            verify=verify,
        )
        for part, data in zip(parts, reader.read(parts), strict=True):
            result[inside(part.box, box)] = data
        return result

    def file(self, name: str) -> bytes:
        """Return the contents of an attached file, checked against its hash.

        Raises:
            KeyError: there is no such file.
            CheckpointError: it is missing or damaged.
        """
        expected = self._manifest.files[name]
        path = f"{self._name}/{FILES}/{name}"
        where = self._storage.location(path)
        try:
            data = self._storage.get(path)
        except (FileNotFoundError, IsADirectoryError):
            raise CheckpointError(f"{where} is missing") from None
        if sha256(data) != expected.sha256:
            raise CheckpointError(f"{where} is damaged: its hash is not the manifest's")
        return data

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.tensors)

    def __len__(self) -> int:
        return len(self._manifest.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest.tensors

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}: step {self.step}, {len(self)} tensors)"


def open_checkpoint(path: str | os.PathLike[str], *, storage: Readable | None = None) -> Checkpoint:
    """Return the tensors of a checkpoint as a mapping, read lazily.

    `path` is a checkpoint, or the directory of several: then the newest committed one. It is a
    path, or an address as for `save`. With `storage`, which takes the place of what is there, it is
    a name in that, "" for the newest.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: its manifest is damaged, or of a newer format.
    """
    return Checkpoint(path, storage=storage)


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint holds besides tensors and files; `path` as for `open`."""
    located = resolve(path)
    return dict(read_manifest(located.storage, located.name).state)

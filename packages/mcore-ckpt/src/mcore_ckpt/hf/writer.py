"""Writing safetensors files tensor by tensor, and making a folder of them appear at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from mcore_ckpt.dtypes import to_numpy
from mcore_ckpt.hf.format import Entry, make_header, size_of
from mcore_ckpt.hf.source import SINGLE
from mcore_ckpt.sources import check_announced
from mcore_parallel.mapping import TensorMeta

DEFAULT_SHARD_BYTES = 5_000_000_000
_METADATA = {"format": "pt"}
_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of a folder and its tensors, in order."""

    file: str
    tensors: Mapping[str, TensorMeta]


def plan_shards(
    tensors: Mapping[str, TensorMeta], max_bytes: int = DEFAULT_SHARD_BYTES
) -> list[Shard]:
    """Return the files for some tensors, filled by name with up to `max_bytes` each.

    Numbers in names count as numbers: layer 2 comes before layer 10. A file
    that holds all is `model.safetensors`; a tensor that is larger has one to itself.

    Raises:
        ValueError: the limit is below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"shards of at most {max_bytes} bytes: the least is 1")
    files: list[dict[str, TensorMeta]] = [{}]
    size = 0
    for name in sorted(tensors, key=_natural):
        meta = tensors[name]
        if files[-1] and size + size_of(meta) > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = meta
        size += size_of(meta)
    if len(files) == 1:
        return [Shard(file=SINGLE, tensors=files[0])]
    return [
        Shard(file=f"model-{i:05}-of-{len(files):05}.safetensors", tensors=held)
        for i, held in enumerate(files, 1)
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


class ShardWriter:
    """Writes the tensors of some shards into a folder, in any order, each file at its first tensor.

    Several ranks may write one folder, each shard by one of them.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder = folder
        self._shards = {name: shard for shard in shards for name in shard.tensors}
        self._open: dict[str, tuple[BinaryIO, dict[str, Entry]]] = {}
        self._missing = {shard.file: set(shard.tensors) for shard in shards}

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a tensor.

        Raises:
            ValueError: it is none of the shards', or of another shape or dtype, or here already.
            OSError: the disk refuses.
        """
        shard = self._shards.get(name)
        check_announced({} if shard is None else shard.tensors, name, value)
        assert shard is not None
        missing = self._missing[shard.file]
        if name not in missing:
            raise ValueError(f"{name} is written twice")
        file, entries = self._opened(shard)
        elements = np.ascontiguousarray(to_numpy(value.detach().cpu().contiguous()))
        file.seek(entries[name].offset)
        file.write(elements.reshape(-1).view(np.uint8).data)
        missing.remove(name)
        if not missing:
            self._finish(shard)

    def close(self) -> None:
        """Close the files; ValueError when a tensor of a shard was never written."""
        for missing in self._missing.values():
            if missing:
                raise ValueError(f"{min(missing)} was announced and not written")

    def abandon(self) -> None:
        """Close the files, whatever is missing."""
        for file, _ in self._open.values():
            file.close()
        self._open.clear()

    def _opened(self, shard: Shard) -> tuple[BinaryIO, dict[str, Entry]]:
        if shard.file not in self._open:
            header, entries = make_header(shard.tensors, _METADATA)
            file = (self._folder / shard.file).open("xb")
            self._open[shard.file] = file, entries
            file.write(header)
        return self._open[shard.file]

    def _finish(self, shard: Shard) -> None:
        file, _ = self._open.pop(shard.file)
        file.flush()
        os.fsync(file.fileno())
        file.close()


def index_of(shards: Sequence[Shard]) -> bytes | None:
    """Return the contents of the index for these shards; None when one file needs none."""
    if [shard.file for shard in shards] == [SINGLE]:
        return None
    files = {name: shard.file for shard in shards for name in shard.tensors}
    size = sum(size_of(meta) for shard in shards for meta in shard.tensors.values())
    document = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()


def begin_folder(folder: Path) -> Path:
    """Create and return the directory in which the contents of `folder` are put together.

    Raises:
        ValueError: something is at `folder` already, or a conversion was left half done.
    """
    check_empty(folder)
    partial = partial_folder(folder)
    if partial.exists():
        raise ValueError(
            f"{partial} is left of a conversion that did not finish, or is still running: remove it"
        )
    partial.mkdir(parents=True)
    return partial


def partial_folder(folder: Path) -> Path:
    """Return where the contents of `folder` are put together."""
    return folder.with_name(folder.name + _PARTIAL)


def check_empty(folder: Path) -> None:
    """Raise ValueError when something is at `folder` that is no empty directory."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a directory that is empty or not there")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a directory that is empty or not there")


def finish_folder(partial: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    """Add some files to what has been put together, and give it its name, durably."""
    for name, contents in files.items():
        path = partial / name
        with path.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
    _sync(partial)
    partial.rename(folder)
    _sync(folder.parent)


def discard_folder(partial: Path) -> None:
    """Remove what has been put together."""
    shutil.rmtree(partial, ignore_errors=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

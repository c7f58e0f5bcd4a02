"""One rank's share of a local checkpoint, as one file.

The file: a line with the format and the version, a line with the length and the CRC-32 of the
header, the header (JSON), and the bytes of the tensors, each from a multiple of 64 on. The name
says of which save it is, and whose share, so that a directory is understood without opening files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_ckpt.checksum import crc32
from mcore_ckpt.dtypes import from_numpy, plain, stored_type, to_numpy
from mcore_ckpt.errors import CheckpointError
from mcore_parallel.layout import LayoutTensor

MAGIC = b"mcore-ckpt local 1\n"
PART = ".part"
_ALIGN = 64
_NAME = re.compile(r"step_(\d{8,})\.([0-9a-f]{16})\.(\d+)-of-(\d+)\.share")


@dataclass(frozen=True, kw_only=True, order=True)
class ShareName:
    """Which save a share is of (`step` and a random `save`), and whose of how many ranks."""

    step: int
    save: str
    rank: int
    size: int

    def __str__(self) -> str:
        return f"step_{self.step:08d}.{self.save}.{self.rank}-of-{self.size}.share"

    @staticmethod
    def parse(text: str) -> ShareName | None:
        """Return what a file name says; None when it is no share's."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        step, save, rank, size = match.groups()
        return ShareName(step=int(step), save=save, rank=int(rank), size=int(size))


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share as its header describes it.

    tensors: by local key what `mcore_ckpt.planning.describe` says, with `offset`, `bytes` and
    `crc32` of what lies in the file. state: as it was saved.
    """

    path: Path
    tensors: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Any]

    @property
    def description(self) -> dict[str, Any]:
        """What `describe` said of the tensors."""
        return {
            key: {name: entry[name] for name in ("dtype", "shape", "fragments")}
            for key, entry in self.tensors.items()
        }

    def read(self) -> dict[str, torch.Tensor]:
        """Return the tensors by local key, mapped from the file, once their checksums are right.

        Raises:
            CheckpointError: damage; names the tensor and the file.
        """
        if not self.tensors:
            return {}
        mapped = np.memmap(self.path, dtype=np.uint8, mode="c")
        found = {}
        for key, entry in self.tensors.items():
            data = mapped[entry["offset"] : entry["offset"] + entry["bytes"]]
            if crc32(data.data) != entry["crc32"]:
                raise CheckpointError(f"{self.path}: {key} is damaged: its checksum is another")
            kind = stored_type(entry["dtype"])
            array = data.view(np.dtype(kind.zarr)).reshape(entry["shape"])
            found[key] = from_numpy(array, entry["dtype"])
        return found


def write_share(
    folder: Path,
    name: ShareName,
    tensors: Mapping[str, LayoutTensor],
    description: Mapping[str, Mapping[str, Any]],
    state: Mapping[str, Any],
) -> Path:
    """Write a rank's tensors durably and return the path; OSError when the disk refuses."""
    values = {key: to_numpy(plain(held.tensor)) for key, held in tensors.items()}
    entries: dict[str, dict[str, Any]] = {}
    offset = 0
    for key, array in values.items():
        data = _bytes(array)
        entries[key] = {
            **description[key],
            "offset": offset,
            "bytes": len(data),
            "crc32": crc32(data),
        }
        offset += -(-len(data) // _ALIGN) * _ALIGN
    header = json.dumps({"state": state, "tensors": entries}).encode()
    start = MAGIC + f"{len(header):012d} {crc32(header):08x}\n".encode() + header
    start += b" " * (-len(start) % _ALIGN)

    path, part = folder / str(name), folder / f"{name}.{os.getpid()}{PART}"
    try:
        with part.open("wb") as file:
            file.write(start)
            for array in values.values():
                data = _bytes(array)
                file.write(data)
                file.write(bytes(-len(data) % _ALIGN))
        publish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return path


def publish(part: Path, path: Path) -> None:
    """Make a file durable, then give it its name."""
    for place in (part, part.parent):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if place == part:
            os.replace(part, path)


def read_share(path: Path) -> Share:
    """Return what a share's header says; CheckpointError when header or length are damaged."""
    with path.open("rb") as file:
        if file.readline(64) != MAGIC:
            raise CheckpointError(f"{path} is no share of a local checkpoint of this version")
        try:
            length, crc = file.readline(64).split()
            header = file.read(int(length))
            if crc32(header) != int(crc, 16):
                raise ValueError("its checksum is another")
            document = json.loads(header)
            start = -(-file.tell() // _ALIGN) * _ALIGN
            tensors = {
                key: {**entry, "offset": start + entry["offset"]}
                for key, entry in document["tensors"].items()
            }
            end = max((e["offset"] + e["bytes"] for e in tensors.values()), default=0)
            state = document["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: its header is damaged: {error}") from None
        if os.fstat(file.fileno()).st_size < end:
            raise CheckpointError(f"{path} is cut short: it lacks the end of its tensors")
    return Share(path=path, tensors=tensors, state=state)


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))

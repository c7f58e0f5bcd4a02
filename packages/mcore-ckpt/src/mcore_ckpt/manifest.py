"""`manifest.json`: everything a checkpoint says about itself, as one value."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from mcore_ckpt.codecs import Codec
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.errors import CheckpointError, NewerFormatError
from mcore_ckpt.grid import Grid
from mcore_ckpt.names import check_paths

FORMAT = "mcore-ckpt"
VERSION = 2
"""The newest version that is read. Version 1 is written unless chunks are encoded."""

_MOST_BYTES = 2**63 - 1
"""Of a tensor: sizes and offsets are signed 64-bit numbers wherever tensors are held."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A global tensor as the manifest lists it.

    dtype: the real dtype's name. chunk_shape: of the regular grid. crc32: of each chunk's bytes
    before any compression, edge chunks filled up with zeros, in the order of the chunks. codec:
    what compresses them. file_shape: of the files that hold many chunks each (zarr's shards).
    """

    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    crc32: tuple[int, ...] = ()
    codec: Codec | None = None
    file_shape: tuple[int, ...] | None = None

    @property
    def is_encoded(self) -> bool:
        """Whether a file is something else than the bytes of a chunk."""
        return self.codec is not None or self.file_shape is not None

    @cached_property
    def files(self) -> Grid:
        """The files of the tensor: each has one writer. They are the chunks, or hold many each."""
        return Grid(self.shape, self.file_shape or self.chunk_shape)

    def key(self, number: int) -> str:
        """Return the name of the file that holds chunk `number`, within its array."""
        if self.file_shape is None:
            return self.grid.key(number)
        per_file = (a // b for a, b in zip(self.file_shape, self.chunk_shape, strict=True))
        coordinates = zip(self.grid.coordinates(number), per_file, strict=True)
        return ".".join(("c", *(str(at // count) for at, count in coordinates)))

    def inside(self, number: int) -> list[int]:
        """Return the numbers of the chunks in file `number`, in ascending order."""
        return (
            [number]
            if self.file_shape is None
            else list(self.grid.overlapping(self.files.box(number)))
        )

    @property
    def file_bytes(self) -> int:
        """Bytes of the chunks of one file."""
        return math.prod(self.files.chunk_shape) * stored_type(self.dtype).itemsize

    @cached_property
    def grid(self) -> Grid:
        """The chunks of the tensor."""
        return Grid(self.shape, self.chunk_shape)

    @property
    def padded(self) -> TensorInfo:
        """The tensor made up of all of its chunks in full: the same chunks, no edge."""
        counts = zip(self.grid.counts, self.chunk_shape, strict=True)
        return replace(self, shape=tuple(count * n for count, n in counts))

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements (edge chunks take a little more on disk)."""
        return math.prod(self.shape) * stored_type(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, and of its file where that is not encoded."""
        return math.prod(self.chunk_shape) * stored_type(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A file kept beside the tensors: its length in bytes and its SHA-256."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`.

    documents: CRC-32 of each zarr document by its path. state: what is no tensor.
    """

    step: int
    tensors: Mapping[str, TensorInfo]
    documents: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    producer: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The version of the format that it takes to read the tensors."""
        return 2 if any(info.is_encoded for info in self.tensors.values()) else 1

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        tensors = {
            name: {
                "dtype": info.dtype,
                "stored_dtype": stored_type(info.dtype).zarr,
                "shape": list(info.shape),
                "chunk_shape": list(info.chunk_shape),
                "crc32": [f"{crc:08x}" for crc in info.crc32],
                **({} if info.codec is None else {"codec": str(info.codec)}),
                **({} if info.file_shape is None else {"file_shape": list(info.file_shape)}),
            }
            for name, info in sorted(self.tensors.items())
        }
        files = {
            name: {"bytes": info.num_bytes, "sha256": info.sha256}
            for name, info in sorted(self.files.items())
        }
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "step": self.step,
            "producer": dict(self.producer),
            "state": dict(self.state),
            "files": files,
            "documents": {path: f"{crc:08x}" for path, crc in sorted(self.documents.items())},
            "tensors": tensors,
        }
        return _lines(document).encode()

    @staticmethod
    def decode(data: bytes, where: str) -> Manifest:
        """Return the manifest in these bytes; `where` is named in errors.

        Raises:
            CheckpointError: not a manifest, or one of a newer format than this release reads.
        """
        try:
            document = json.loads(data)
            found = (document["format"], document["version"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not a checkpoint manifest: {error!r}") from None
        if found[0] != FORMAT or not isinstance(found[1], int) or not 1 <= found[1] <= VERSION:
            raise NewerFormatError(
                f"{where} has format {found[0]!r} version {found[1]!r}; this release of mcore-ckpt "
                f"({producer()['mcore-ckpt']}) reads {FORMAT!r} versions 1 to {VERSION}"
            )
        try:
            for key in ("tensors", "documents", "files"):
                check_paths(document[key], "name")
            for key in ("state", "producer"):
                if not isinstance(document[key], dict):
                    raise ValueError(f"{key} is {document[key]!r}, no object")
            return Manifest(
                step=_whole_number("step", document["step"]),
                tensors={name: _tensor(entry) for name, entry in document["tensors"].items()},
                documents={path: int(crc, 16) for path, crc in document["documents"].items()},
                files={
                    name: FileInfo(
                        num_bytes=_whole_number(name, entry["bytes"]), sha256=str(entry["sha256"])
                    )
                    for name, entry in document["files"].items()
                },
                state=document["state"],
                producer=document["producer"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: {error!r}") from None


def _lines(document: Mapping[str, Any]) -> str:
    """Return JSON with a line for each field, and in those that are objects for each entry.

    Readable, and an order of magnitude faster to make than `indent=1`.
    """
    fields = []
    for key, value in document.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, dict) and value:
            entries = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = "{\n" + ",\n".join(entries) + "\n }"
        fields.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _tensor(entry: Mapping[str, Any]) -> TensorInfo:
    info = TensorInfo(
        dtype=stored_type(str(entry["dtype"])).name,
        shape=_extents(entry, "shape", 0),
        chunk_shape=_extents(entry, "chunk_shape", 1),
        crc32=tuple(int(crc, 16) for crc in entry["crc32"]),
        codec=Codec.parse(entry["codec"]) if "codec" in entry else None,
        file_shape=_extents(entry, "file_shape", 1) if "file_shape" in entry else None,
    )
    if info.num_bytes > _MOST_BYTES:
        raise ValueError(f"shape {list(info.shape)} is of {info.num_bytes} bytes")
    if info.file_shape is not None:
        _check_file_shape(info, info.file_shape)
    if len(info.crc32) != info.grid.num_chunks:
        raise ValueError(f"{len(info.crc32)} checksums for {info.grid.num_chunks} chunks")
    return info


def _whole_number(what: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is {value!r}, no whole number from 0 on")
    return value


def _extents(entry: Mapping[str, Any], field: str, least: int) -> tuple[int, ...]:
    value = entry[field]
    if not isinstance(value, list) or len(value) != len(entry["shape"]):
        raise ValueError(f"{field} is {value!r} for a tensor of shape {entry['shape']!r}")
    for n in value:
        if type(n) is not int or n < least:
            raise ValueError(f"{field} is {value!r}, not whole numbers from {least} on")
    return tuple(value)


def _check_file_shape(info: TensorInfo, file_shape: Sequence[int]) -> None:
    """Raise ValueError when files hold parts of chunks, or more of them than the tensor has."""
    for count, chunk, size in zip(info.grid.counts, info.chunk_shape, file_shape, strict=True):
        if size % chunk:
            raise ValueError(f"files of {file_shape} hold no whole chunks {info.chunk_shape}")
        if size > chunk * max(1, count):
            raise ValueError(
                f"files of {file_shape} are larger than the tensor {list(info.shape)} in chunks "
                f"{info.chunk_shape}"
            )


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def producer() -> dict[str, str]:
    """Return the versions of what wrote a checkpoint, for the manifest.

    "source" stands for a package that runs from its sources without being installed.
    """
    return {name: _version(name) for name in ("mcore-ckpt", "tensorstore", "torch")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source"


def check_json(value: Any, where: str = "state") -> Json:
    """Return `value` as it will come back from JSON (tuples become lists).

    Raises:
        ValueError: it would come back as something else; the message names the place.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, and JSON has no such number; store it as None")
        return value
    if isinstance(value, list | tuple):
        return [check_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings")
        return {key: check_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(
        f"{where} is a {type(value).__name__}; JSON holds None, bool, int, float, str, list, dict"
    )

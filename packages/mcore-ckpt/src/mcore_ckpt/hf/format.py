"""The safetensors file: 8 bytes of header length, a JSON header, the elements.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.errors import CheckpointError
from mcore_parallel.mapping import TensorMeta

_MAX_HEADER = 100_000_000  # bytes; the format's own bound
_LENGTH = 8
_METADATA = "__metadata__"
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_TO_FILE = {stored_type(ours).torch: theirs for theirs, ours in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of a file: what it is and the byte at which its elements begin."""

    meta: TensorMeta
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return size_of(self.meta)


def size_of(meta: TensorMeta) -> int:
    """Return the bytes that a tensor's elements take."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file by name, checked against the file's length.

    Raises:
        CheckpointError: the file is missing, cut off or no such file; names it and the field.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH:
                raise CheckpointError(f"{path} has {size} bytes: no safetensors file")
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{path} is no safetensors file: it begins with a header length of {length} "
                    f"bytes, and {_MAX_HEADER} are the most"
                )
            if _LENGTH + length > size:
                raise CheckpointError(
                    f"{path} is cut off: {size} bytes, and the header alone takes {length}"
                )
            header = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    entries = _parse(path, header, _LENGTH + length)
    _check_extent(path, entries, _LENGTH + length, size)
    return entries


def _parse(path: Path, header: bytes, data: int) -> dict[str, Entry]:
    try:
        document = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file: its header is no JSON ({error})"
        ) from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no JSON object")
    return {
        name: _entry(f"{path}: {name}", fields, data)
        for name, fields in document.items()
        if name != _METADATA
    }


def _entry(what: str, fields: Any, data: int) -> Entry:
    if not isinstance(fields, dict):
        raise CheckpointError(f"{what} is {fields!r} in the header, not an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _NAMES:
        raise CheckpointError(f"{what} has dtype {dtype!r}; known are {', '.join(_NAMES)}")
    numbers = _whole_numbers(shape)
    if numbers is None:
        raise CheckpointError(f"{what} has shape {shape!r}, not a list of whole numbers")
    meta = TensorMeta(numbers, stored_type(_NAMES[dtype]).torch)
    span = _whole_numbers(offsets)
    if span is None or len(span) != 2:
        raise CheckpointError(f"{what} has data_offsets {offsets!r}, not two whole numbers")
    begin, end = span
    if end - begin != size_of(meta):
        raise CheckpointError(
            f"{what} has data_offsets {offsets} for {end - begin} bytes, and {dtype} of shape "
            f"{shape} takes {size_of(meta)}"
        )
    return Entry(meta=meta, offset=data + begin)


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _check_extent(path: Path, entries: Mapping[str, Entry], data: int, size: int) -> None:
    """Check that the tensors follow each other without gaps up to the end of the file."""
    end, last = data, "the header"
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        if entry.offset != end:
            raise CheckpointError(
                f"{path}: {name} begins at byte {entry.offset}, and {last} ends at {end}"
            )
        end, last = entry.offset + entry.num_bytes, name
    if end > size:
        raise CheckpointError(f"{path} is cut off: {size} bytes, and {last} ends at {end}")
    if end < size:
        raise CheckpointError(f"{path} has {size} bytes, and {last}, the last, ends at {end}")


def make_header(
    tensors: Mapping[str, TensorMeta], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return the beginning of a file of these tensors, and where each one's elements go.

    The widest dtypes come first, so that every tensor lies at a multiple of its element's size.

    Raises:
        ValueError: the format has no such dtype.
    """
    document: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    end = 0
    for name in order:
        meta = tensors[name]
        if meta.dtype not in _TO_FILE:
            raise ValueError(f"{name}: safetensors has no dtype for {meta.dtype}")
        document[name] = {
            "dtype": _TO_FILE[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [end, end + size_of(meta)],
        }
        end += size_of(meta)
    header = json.dumps(document, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH)
    start = len(header).to_bytes(_LENGTH, "little") + header
    entries = {
        name: Entry(meta=tensors[name], offset=len(start) + document[name]["data_offsets"][0])
        for name in order
    }
    return start, entries

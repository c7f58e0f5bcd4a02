"""The zip archive that `torch.save` writes: a pickle, and the elements of each tensor beside it.

Tensors come back as views of the mapped file: nothing but what is looked at is read. Files from
before torch 1.6 have another form and are refused.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.torchfile.unpickling import load_pickle

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_LOCAL_HEADER = 30  # bytes before the name in a zip entry; the lengths of name and extra end it


class Mapped:
    """A file mapped into memory, read only when it is looked at; changes to it stay private.

    Raises:
        CheckpointError: there is no such file, or it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.bytes = np.memmap(path, dtype=np.uint8, mode="c")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except ValueError:
            raise CheckpointError(f"{path} is empty") from None

    def __len__(self) -> int:
        return len(self.bytes)


class _Stream(io.RawIOBase):
    """Part of a mapped file, as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)
        part = self._view[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Archive:
    """The entries of an archive within a mapped file."""

    def __init__(self, mapped: Mapped, start: int, stop: int, where: str) -> None:
        if not 0 <= start <= stop <= len(mapped):
            raise CheckpointError(
                f"{mapped.path} is cut off: {len(mapped)} bytes, and {where} ends at {stop}"
            )
        self._bytes = mapped.bytes[start:stop]
        self._where = where
        try:
            with zipfile.ZipFile(_Stream(memoryview(self._bytes))) as archive:  # type: ignore[arg-type]
                self._entries = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
            raise CheckpointError(
                f"{where} is no file of torch.save (1.6 or later): {error}"
            ) from None
        found = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(found) != 1:
            raise CheckpointError(f"{where} is no file of torch.save: it has {len(found)} pickles")
        self._root = found[0].removesuffix("data.pkl")
        order = self._root + "byteorder"
        if order in self._entries and self.member(order).tobytes() != b"little":
            raise CheckpointError(f"{where} was written on a big-endian machine")

    def member(self, name: str) -> Any:
        """Return the bytes of an entry, as an array over the file."""
        info = self._entries.get(name)
        if info is None:
            raise CheckpointError(f"{self._where}: the entry {name} is missing")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._where}: the entry {name} is compressed")
        head = self._bytes[info.header_offset : info.header_offset + _LOCAL_HEADER]
        name_and_extra = np.frombuffer(head[26:30].tobytes(), "<u2").sum(dtype=np.int64)
        begin = info.header_offset + _LOCAL_HEADER + int(name_and_extra)
        if begin + info.file_size > len(self._bytes):
            raise CheckpointError(f"{self._where}: the entry {name} is cut off")
        return self._bytes[begin : begin + info.file_size]

    def storage(self, key: str) -> torch.Tensor:
        """Return the bytes of a tensor's storage."""
        found = self.member(f"{self._root}data/{key}")
        return torch.from_numpy(found) if len(found) else torch.empty(0, dtype=torch.uint8)

    def load(self) -> Any:
        """Return what the pickle holds."""
        storages: dict[str, torch.Tensor] = {}

        def persistent(given: Any) -> torch.Tensor:
            if not isinstance(given, tuple) or len(given) < 5 or given[0] != "storage":
                raise CheckpointError(f"it has a value of an unknown kind outside: {given!r}")
            _, dtype, key, _, count = given[:5]
            if not isinstance(dtype, torch.dtype) or not isinstance(key, str):
                raise CheckpointError(f"it has a storage of an unknown kind: {dtype!r}")
            if key not in storages:
                storages[key] = self.storage(key)
            values = storages[key].view(dtype)
            if len(values) != count:
                raise CheckpointError(f"storage {key} has {len(values)} elements, not {count}")
            return values

        pickled = io.BytesIO(self.member(self._root + "data.pkl").tobytes())
        return load_pickle(pickled, self._where, _TENSORS, persistent)


def _tensor(
    storage: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> torch.Tensor:
    """Return a view of a storage; what else there is says nothing about the values."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min([offset, *size, *stride]) < 0 or (torch.Size(size).numel() and last >= len(storage)):
        raise CheckpointError(f"a tensor of shape {list(size)} leaves its storage")
    return storage.as_strided(tuple(size), tuple(stride), offset)


def _typed_tensor(
    storage: torch.Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    _grad: Any,
    _hooks: Any,
    dtype: torch.dtype,
    *_: Any,
) -> torch.Tensor:
    return _tensor(storage.view(dtype), offset, size, stride)


def _parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


def _of_type(make: Any, _kind: Any, arguments: Sequence[Any], _state: Any) -> Any:
    """A tensor that had attributes, or a class of its own: the tensor alone."""
    if make not in (_tensor, _typed_tensor, _parameter):
        raise CheckpointError(f"it makes a tensor by {make!r}, which is not looked up")
    return make(*arguments)


_TENSORS: Mapping[tuple[str, str], Any] = {
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}


def load_archive(mapped: Mapped, start: int = 0, stop: int | None = None, where: str = "") -> Any:
    """Return what `torch.save` has written between two bytes of a mapped file.

    Tensors are views of the file: whoever keeps one copies it.

    where: what it is, for messages; default the file.

    Raises:
        CheckpointError: it is damaged, or holds what is not known to be a value alone.
    """
    stop = len(mapped) if stop is None else stop
    return _Archive(mapped, start, stop, where or str(mapped.path)).load()


def load_file(path: Path) -> Any:
    """Return what `torch.save` has written into a file; as `load_archive`."""
    return load_archive(Mapped(path))

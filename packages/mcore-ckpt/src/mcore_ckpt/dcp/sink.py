"""A DCP folder written tensor by tensor, by one process."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_ckpt.addresses import local_path
from mcore_ckpt.dcp.metadata import METADATA
from mcore_ckpt.hf.writer import (
    DEFAULT_SHARD_BYTES,
    begin_folder,
    check_empty,
    discard_folder,
    finish_folder,
)
from mcore_ckpt.sources import check_announced
from mcore_parallel.mapping import TensorMeta


class DcpSink:
    """Writes tensors so that `torch.distributed.checkpoint` loads them, one at a time.

    Whoever loads asks for a nested state dict whose keys, joined by dots, are the names here. The
    folder appears when the context ends: what is under way lies in `<folder>.partial`.

    Args:
        folder: where it goes: a directory that is empty or not there.
        tensors: what will be written, by the keys that lead to it.
        objects: what else there is, by the keys that lead to it: values that JSON has.
        max_file_bytes: size at which another file is begun.

    Raises:
        ValueError: something is at `folder` already, or a limit below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tensors: Mapping[tuple[str, ...], TensorMeta],
        *,
        objects: Mapping[tuple[str, ...], Any] | None = None,
        max_file_bytes: int = DEFAULT_SHARD_BYTES,
    ) -> None:
        if max_file_bytes < 1:
            raise ValueError(f"files of at most {max_file_bytes} bytes: the least is 1")
        self._folder = local_path(folder).absolute()
        check_empty(self._folder)
        self._limit = max_file_bytes
        self._paths = {".".join(path): path for path in [*tensors, *(objects or {})]}
        self._announced = {".".join(path): meta for path, meta in tensors.items()}
        self._objects = {".".join(path): value for path, value in (objects or {}).items()}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._missing = set(self._announced)
        self._number = 0
        self._file: BinaryIO | None = None

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a tensor, under its keys joined by dots.

        Raises:
            ValueError: it was not announced so, or is here already.
            OSError: the disk refuses.
        """
        meta = check_announced(self._announced, name, value)
        if name not in self._missing:
            raise ValueError(f"{name} is written twice")
        # A view of a larger tensor would take the whole of it along.
        self._put(
            MetadataIndex(name, torch.Size([0] * len(meta.shape))), value.detach().cpu().clone()
        )
        self._missing.remove(name)

    def __enter__(self) -> Self:
        self._partial = begin_folder(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            if self._file is not None:
                self._file.close()
            discard_folder(self._partial)  # not there any more when all went well

    def _put(self, index: MetadataIndex, value: Any) -> None:
        file = self._opened()
        start = file.tell()
        told = _Telling(file)
        try:
            torch.save(value, told)  # type: ignore[arg-type]  # write and flush are all it needs
        except RuntimeError:
            if told.error is not None:
                raise told.error from None
            raise
        self._stored[index] = _StorageInfo(Path(file.name).name, start, file.tell() - start)

    def _opened(self) -> BinaryIO:
        if self._file is None or self._file.tell() >= self._limit:
            self._close()
            self._file = (self._partial / f"__0_{self._number}.distcp").open("xb")
            self._number += 1
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        if self._missing:
            raise ValueError(f"{min(self._missing)} was announced and not written")
        for name, value in self._objects.items():
            self._put(MetadataIndex(name), value)
        self._close()
        described: dict[str, Any] = {
            name: _described(meta) for name, meta in self._announced.items()
        }
        described |= {name: BytesStorageMetadata() for name in self._objects}
        metadata = Metadata(
            state_dict_metadata=described, planner_data=self._paths, storage_data=self._stored
        )
        buffer = io.BytesIO()
        pickle.dump(metadata, buffer)
        finish_folder(self._partial, self._folder, {METADATA: buffer.getvalue()})


class _Telling:
    """A file that remembers what the disk refused: torch says only that it is not where it was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write some bytes."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Hand the bytes over to the system."""
        self._file.flush()


def _described(meta: TensorMeta) -> TensorStorageMetadata:
    shape = torch.Size(meta.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=meta.dtype), size=shape, chunks=[whole]
    )

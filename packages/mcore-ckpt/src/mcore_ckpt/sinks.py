"""A checkpoint of ours as a sink: written tensor by tensor, by one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from mcore_ckpt.addresses import Place, absolute, storage_at
from mcore_ckpt.codecs import Codec
from mcore_ckpt.commit import begin, remove_checkpoint
from mcore_ckpt.completing import complete
from mcore_ckpt.documents import array_document, encode
from mcore_ckpt.dtypes import plain, stored_type, to_numpy
from mcore_ckpt.engine import ChunkData, Engine, Writing
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.manifest import TensorInfo, check_json
from mcore_ckpt.marks import check_mark, is_marked, new_mark
from mcore_ckpt.names import DOCUMENT, check_path, check_tensor_names
from mcore_ckpt.planning import tensor_info
from mcore_ckpt.sources import MODEL, check_announced
from mcore_ckpt.writer import Writer
from mcore_parallel.mapping import TensorMeta


class CheckpointSink:
    """Writes weights as a new checkpoint, one tensor at a time: the bytes that `save` would write.

    The checkpoint is committed when the context ends; before, and after an error, it is none.

    Args:
        directory: of checkpoints, a path or an address, as for `save`.
        tensors: what will be written, by names without `prefix`.
        step, state, files: as for `save`.
        prefix: what stands before the names: "" for tensors of several kinds.
        chunk_bytes, compression, file_bytes: how tensors lie on disk, as for `save`.

    Raises:
        ValueError: names or dtypes that the format does not have, or state that is not JSON.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tensors: Mapping[str, TensorMeta],
        *,
        step: int = 0,
        state: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        prefix: str = MODEL,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        compression: str | None = None,
        file_bytes: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        if engine is None:
            from mcore_ckpt.default_engine import DefaultEngine

            engine = DefaultEngine()
        self._engine = engine
        self._directory = absolute(directory)
        self._storage = storage_at(directory)
        self._announced = dict(tensors)
        self._prefix = prefix
        codec = None if compression is None else Codec.parse(compression)
        self._infos = {
            prefix + name: _info(name, meta, chunk_bytes, codec, file_bytes)
            for name, meta in sorted(tensors.items())
        }
        check_tensor_names(self._infos)
        self._step = step
        self._state = check_json(state or {})
        self._files = dict(files or {})
        for name in self._files:
            check_path(name, "file name")
        self._checksums: dict[str, tuple[int, ...]] = {}
        self._under_way: Writing | None = None

    @property
    def path(self) -> Place:
        """The checkpoint's own directory, a path or an address."""
        return self._directory / self._name

    def write(self, name: str, value: torch.Tensor) -> None:
        """Write a tensor.

        Raises:
            ValueError: it was not announced so, or is here already.
            OSError: the disk refuses.
        """
        check_announced(self._announced, name, value)
        stored = self._prefix + name
        if stored in self._checksums:
            raise ValueError(f"{name} is written twice")
        info = self._infos[stored]
        self._writer.make_directory(stored)
        if info.grid.num_chunks:
            self._writer.put(f"{stored}/{DOCUMENT}", encode(array_document(info)))
        checksums: dict[int, int] = {}
        chunks = _chunks(f"{self._name}/{stored}", info, value)
        for batch in _batches(chunks, info):
            for chunk in batch:
                self._writer.wrote(f"{stored}/{info.files.key(chunk.number)}")
            numbers = [number for chunk in batch for number in info.inside(chunk.number)]
            self._under_way = self._engine.write(self._storage, batch)
            written = self._under_way.wait()
            self._under_way = None
            checksums.update(zip(numbers, written, strict=True))
        self._checksums[stored] = tuple(checksums[number] for number in sorted(checksums))

    def __enter__(self) -> Self:
        self._mark = new_mark()
        self._name = begin(self._storage, self._step, self._mark)
        self._writer = Writer(self._storage, self._name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        committed = own = False
        try:
            if error is None:
                check_mark(self._storage, self._name, self._mark)
                own = True
                self._commit()
                committed = True
        finally:
            if not committed:  # if that fails too, the next save sweeps it
                self._settle()
                with contextlib.suppress(OSError):
                    if own or is_marked(self._storage, self._name, self._mark):
                        remove_checkpoint(self._storage, self._name)

    def _settle(self) -> None:
        """Wait for chunks that an interrupt left under way: none may come when all is removed."""
        if self._under_way is not None:
            with contextlib.suppress(OSError):
                self._under_way.wait()

    def _commit(self) -> None:
        missing = self._infos.keys() - self._checksums.keys()
        if missing:
            raise ValueError(f"{min(missing)} was announced and not written")
        complete(
            self._storage,
            self._name,
            self._writer,
            step=self._step,
            tensors={
                name: replace(info, crc32=self._checksums[name])
                for name, info in self._infos.items()
            },
            state=self._state,
            files=self._files,
        )


def _info(
    name: str, meta: TensorMeta, chunk_bytes: int, codec: Codec | None, file_bytes: int | None
) -> TensorInfo:
    try:
        dtype = stored_type(meta.dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return tensor_info(dtype.name, meta.shape, chunk_bytes, codec, file_bytes)


def _chunks(array: str, info: TensorInfo, value: torch.Tensor) -> Iterator[ChunkData]:
    """Yield a tensor's files: those at the edge in full, filled up with zeros."""
    elements, files = to_numpy(plain(value)), info.files
    for number in range(files.num_chunks):
        box = files.box(number)
        part = elements[box.slices]
        if box.shape != files.chunk_shape:
            whole = np.zeros(files.chunk_shape, dtype=part.dtype)
            whole[tuple(slice(0, n) for n in box.shape)] = part
            part = whole
        yield ChunkData(array=array, info=info, number=number, data=part)


def _batches(chunks: Iterable[ChunkData], info: TensorInfo) -> Iterator[list[ChunkData]]:
    """Take some chunks at a time: they are copies, and the whole tensor is in memory already."""
    size = max(1, (64 << 20) // max(info.file_bytes, 1))
    batch: list[ChunkData] = []
    for chunk in chunks:
        batch.append(chunk)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

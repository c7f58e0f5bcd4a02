"""Chunks through tensorstore's zarr3 driver. The one module that imports tensorstore."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorstore as ts

from mcore_ckpt.checksum import checksum
from mcore_ckpt.documents import array_document
from mcore_ckpt.dtypes import Array
from mcore_ckpt.engine import ChunkData, Engine, Region, Writing
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.kv_storage import KvStorage
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.storage import Readable, Storage


class TensorstoreEngine(Engine):
    """Reads and writes through tensorstore, with its own threads.

    inflight_bytes: bound on the memory of chunks being read ahead. io_threads: files open at once.
    """

    def __init__(self, *, inflight_bytes: int = 256 << 20, io_threads: int = 32) -> None:
        self.inflight_bytes = inflight_bytes
        self._context = ts.Context(
            {
                # Whoever saves syncs all files at once when they are written; that is faster.
                "file_io_sync": False,
                "file_io_concurrency": {"limit": io_threads},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks (see `Engine.write`)."""
        arrays: dict[str, Any] = {}
        futures: list[tuple[str, Any]] = []
        chunks = list(chunks)
        for chunk in chunks:
            if chunk.array not in arrays:
                arrays[chunk.array] = self._open(storage, chunk.array, chunk.info)
        arrays = {array: opened.result() for array, opened in arrays.items()}
        for chunk in chunks:
            grid = chunk.info.files
            box = grid.box(chunk.number)
            inside = tuple(slice(0, n) for n in box.shape)
            where = storage.location(f"{chunk.array}/{grid.key(chunk.number)}")
            written = arrays[chunk.array][box.slices].write(
                chunk.data[inside], can_reference_source_data_indefinitely=True
            )
            futures.append((where, written))
        return _Writing(futures, chunks)

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead (see `Engine.read`)."""
        arrays: dict[str, Any] = {}
        waiting: deque[tuple[Region, Any]] = deque()
        inflight = 0
        for region in regions:
            if region.array not in arrays:
                arrays[region.array] = self._open(storage, region.array, region.info)
        arrays = {array: opened.result() for array, opened in arrays.items()}
        for region in regions:
            while waiting and inflight + region.info.chunk_bytes > self.inflight_bytes:
                inflight -= waiting[0][0].info.chunk_bytes
                yield self._result(storage, *waiting.popleft())
            waiting.append((region, arrays[region.array][region.box.slices].read()))
            inflight += region.info.chunk_bytes
        while waiting:
            yield self._result(storage, *waiting.popleft())

    def _open(self, storage: Readable, array: str, info: TensorInfo) -> Any:
        spec = {
            "driver": "zarr3",
            "metadata": array_document(info),
            "open": True,
            "assume_metadata": True,  # the manifest has it; saves one read for each array
            # A chunk that is not there is damage, never zeros.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
        }
        if isinstance(storage, KvStorage):
            return ts.open(spec, kvstore=storage.at(array))
        spec["kvstore"] = {"driver": "file", "path": storage.location(array) + "/"}
        return ts.open(ts.Spec(spec), context=self._context)

    @staticmethod
    def _result(storage: Readable, region: Region, future: Any) -> Array:
        try:
            array: Array = future.result()
        except Exception as error:  # tensorstore raises many kinds
            number = next(region.info.grid.overlapping(region.box))
            where = storage.location(f"{region.array}/{region.info.key(number)}")
            raise CheckpointError(f"cannot read chunk {where}: {error}") from None
        return array


class _Writing:
    def __init__(self, futures: list[tuple[str, Any]], chunks: list[ChunkData]) -> None:
        self._futures = futures
        self._chunks = chunks

    def wait(self) -> list[int]:
        """Return the checksums when every chunk is written."""
        failed: OSError | None = None
        # In this thread: while Python ends no other can be started, and tensorstore still writes.
        sums = [checksum(data) for chunk in self._chunks for data in chunk.chunks]
        for where, future in self._futures:  # wait for all of them: their memory is in use
            try:
                future.result()
            except Exception as error:  # tensorstore raises many kinds
                failed = failed or OSError(f"cannot write chunk {where}: {error}")
        self._futures = []
        self._chunks = []
        if failed:
            raise failed
        return sums

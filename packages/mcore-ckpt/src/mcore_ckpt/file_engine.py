"""The default engine: a chunk without compression is its bytes, in a file of its own.

So it is written and read by plain system calls in several threads. Nobody reads a chunk before the
commit, and nobody writes one after it: no lock and no rename is needed, which for small chunks cost
several times what writing does. Whatever is done to a chunk is done by one thread, piece by piece,
while a processor has the piece in its cache: taking it out of a tensor, the checksum, the write.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from mcore_ckpt.checksum import crc32
from mcore_ckpt.dtypes import Array, stored_type
from mcore_ckpt.engine import ChunkData, Engine, Region, Writing
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage import Readable, Storage, read_file, write_file

T = TypeVar("T")
_BATCH_CHUNKS = 64
_BATCH_BYTES = 8 << 20
_BLOCK = 512 << 10  # bytes: fits into the caches of a core


class FileEngine(Engine):
    """Reads and writes the files of chunks.

    inflight_bytes: bound on the memory of chunks being read ahead. io_threads: files open at once.
    """

    def __init__(self, *, inflight_bytes: int = 256 << 20, io_threads: int = 16) -> None:
        self.inflight_bytes = inflight_bytes
        self.io_threads = io_threads

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks (see `Engine.write`)."""
        return _Writing(storage, chunks, self.io_threads)

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead (see `Engine.read`).

        Of a chunk only those indices of its first dimension are read that the region needs: one
        stretch of its file.
        """
        waiting: deque[tuple[int, Future[Array]]] = deque()
        inflight = 0
        with ThreadPoolExecutor(self.io_threads, thread_name_prefix="mcore-ckpt-read") as pool:
            for region in regions:
                size = region.info.chunk_bytes
                while waiting and inflight + size > self.inflight_bytes:
                    done, future = waiting.popleft()
                    inflight -= done
                    yield future.result()
                waiting.append((size, pool.submit(_read, storage, region, _Scratch())))
                inflight += size
            while waiting:
                yield waiting.popleft()[1].result()


class _Writing:
    """Chunks on their way into files."""

    def __init__(self, storage: Storage, chunks: Iterable[ChunkData], threads: int) -> None:
        """Start writing chunks into directories that exist."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mcore-ckpt-write")
        self._scratch = _Scratch()
        files = (
            (storage.location(f"{c.array}/{c.info.grid.key(c.number)}"), c.data) for c in chunks
        )
        self._futures: list[Future[list[int]]] = [
            self._pool.submit(self._write, batch)
            for batch in _batches(files, lambda file: file[1].nbytes)
        ]

    def wait(self) -> list[int]:
        """Return the checksums when every chunk is written."""
        self._pool.shutdown()  # all of them, also after an error: their memory is in use
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()


def _read(storage: Readable, region: Region) -> Array:
    grid, info = region.info.grid, region.info
    number = next(grid.overlapping(region.box))
    chunk = grid.box(number)
    location = storage.location(f"{region.array}/{grid.key(number)}")
    inside = [
        slice(a - b, a - b + n)
        for a, b, n in zip(region.box.start, chunk.start, region.box.shape, strict=True)
    ]
    rows = inside[0] if inside else slice(0, 1)
    stretch = (rows.stop - rows.start, *info.chunk_shape[1:]) if inside else ()
    row_bytes = info.chunk_bytes // (info.chunk_shape[0] if inside else 1)
    into = scratch.of((rows.stop - rows.start) * row_bytes)
    array: Array = into.view(stored_type(info.dtype).zarr).reshape(stretch)
    try:
        read_file(location, into.data, start=rows.start * row_bytes, size=info.chunk_bytes)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"cannot read chunk {location}: {error}") from None
    return array[(slice(None), *inside[1:])] if inside else array


def _batches(
    items: Iterable[T], size_of: Callable[[T], int], num_bytes: int = _BATCH_BYTES
) -> Iterator[list[T]]:
    """Take small chunks together: handing one to a thread costs as much as writing it."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += size_of(item)
        if len(batch) == _BATCH_CHUNKS or size >= num_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

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

    encodes = False

    def __init__(self, *, inflight_bytes: int = 256 << 20, io_threads: int = 8) -> None:
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

    def visit(
        self, storage: Readable, regions: Sequence[Region], take: Callable[[int, Array], None]
    ) -> None:
        """Call `take` in the threads that read (see `Engine.visit`): one region for each."""
        scratch = _Scratch()

        def run(batch: Sequence[int]) -> None:
            for number in batch:
                take(number, _read(storage, regions[number], scratch))

        share = sum(region.info.chunk_bytes for region in regions) // (4 * self.io_threads)
        batches = _batches(
            range(len(regions)),
            lambda number: regions[number].info.chunk_bytes,
            min(share, _BATCH_BYTES),
        )
        with ThreadPoolExecutor(self.io_threads, thread_name_prefix="mcore-ckpt-read") as pool:
            futures = [pool.submit(run, batch) for batch in batches]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class _Scratch(threading.local):
    """Memory of each thread for one piece: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> Array:
        """Return so many bytes; they are overwritten by the next call in this thread."""
        if self._bytes.nbytes < num_bytes:
            self._bytes = np.empty(num_bytes, np.uint8)
        return self._bytes[:num_bytes]


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
        return [checksum for future in futures for checksum in future.result()]

    def _write(self, files: list[tuple[str, Array]]) -> list[int]:
        checksums = []
        for location, data in files:
            pieces = _Pieces(data, self._scratch)
            try:
                write_file(location, pieces)
            except OSError as error:
                text = f"cannot write chunk {location}: {error.strerror}"
                raise OSError(error.errno, text) from None
            checksums.append(pieces.checksum)
        return checksums


class _Pieces:
    """The bytes of an array of any strides, piece by piece, and the checksum of those taken."""

    def __init__(self, data: Array, scratch: _Scratch) -> None:
        self.checksum = 0
        self._data = np.atleast_1d(data.squeeze())
        self._scratch = scratch

    def __iter__(self) -> Iterator[memoryview]:
        data = self._data
        row_bytes = data.nbytes // max(1, len(data))
        rows = max(1, _BLOCK // max(1, row_bytes))
        for start in range(0, len(data), rows):
            piece = data[start : start + rows]
            if not piece.flags.c_contiguous:
                whole = self._scratch.of(piece.nbytes).view(piece.dtype).reshape(piece.shape)
                np.copyto(whole, piece)
                piece = whole
            block = piece.reshape(-1).view(np.uint8).data
            self.checksum = crc32(block, self.checksum)
            yield block


def _read(storage: Readable, region: Region, scratch: _Scratch) -> Array:
    info = region.info
    coordinates = [a // n for a, n in zip(region.box.start, info.chunk_shape, strict=True)]
    location = storage.location(f"{region.array}/{info.grid.key_at(coordinates)}")
    inside = [
        slice(a - c * n, a - c * n + size)
        for a, c, n, size in zip(
            region.box.start, coordinates, info.chunk_shape, region.box.shape, strict=True
        )
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

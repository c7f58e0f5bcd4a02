"""The default engine: a chunk without compression is its bytes, in a file of its own.

So it is written and read by plain system calls in several threads. Nobody reads a chunk before the
commit, and nobody writes one after it: no lock and no rename is needed, which for small chunks cost
several times what writing does. Whatever is done to a chunk is done by one thread, piece by piece,
while a processor has the piece in its cache: taking it out of a tensor, the checksum, the write.

Chunks are written past the system's page cache, where that can be: nobody reads them soon, and a
copy in the cache takes as much of the processors as all the rest, and drives out what others read.
They are read through it, since replicas on one machine read the same ones.
"""

from __future__ import annotations

import math
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
from mcore_ckpt.storage import DIRECT, LARGE, Readable, Storage, read_file, will_read, write_file

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
                stretch = _Stretch(storage, region)
                waiting.append((size, pool.submit(stretch.read, _Scratch())))
                inflight += size
            while waiting:
                yield waiting.popleft()[1].result()

    def visit(
        self, storage: Readable, regions: Sequence[Region], take: Callable[[int, Array], None]
    ) -> None:
        """Call `take` in the threads that read (see `Engine.visit`): one region for each."""
        scratch = _Scratch()

        def run(batch: Sequence[int]) -> None:
            stretches = [_Stretch(storage, regions[number]) for number in batch]
            for stretch in stretches:  # the disk has all of them to do, while the first is taken
                stretch.announce()
            for number, stretch in zip(batch, stretches, strict=True):
                take(number, stretch.read(scratch))

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
        """Return so many bytes, aligned; they are overwritten by the next call in this thread."""
        if self._bytes.nbytes < num_bytes:
            memory = np.empty(num_bytes + DIRECT, np.uint8)
            first = -memory.ctypes.data % DIRECT
            self._bytes = memory[first : first + num_bytes]
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
                write_file(location, pieces, past_cache=pieces.aligned)
            except OSError as error:
                text = f"cannot write chunk {location}: {error.strerror}"
                raise OSError(error.errno, text) from None
            checksums.append(pieces.checksum)
        return checksums


class _Pieces:
    """The bytes of an array of any strides, piece by piece, and the checksum of those taken.

    aligned: whether the pieces are as `write_file` needs them to go past the page cache.
    """

    def __init__(self, data: Array, scratch: _Scratch) -> None:
        self.checksum = 0
        self._data = np.atleast_1d(data.squeeze())
        self._scratch = scratch
        row_bytes = max(1, self._data.nbytes // max(1, len(self._data)))
        rows = _BLOCK // row_bytes
        unit = DIRECT // math.gcd(DIRECT, row_bytes)  # rows that are a multiple of DIRECT
        if len(self._data) <= rows:  # it is one piece
            unit = 1
        self.aligned = data.nbytes >= LARGE and rows >= unit
        self._rows = rows // unit * unit if self.aligned else max(1, rows)

    def __iter__(self) -> Iterator[memoryview]:
        data = self._data
        for start in range(0, len(data), self._rows):
            piece = data[start : start + self._rows]
            if self.aligned or not piece.flags.c_contiguous:
                whole = self._scratch.of(piece.nbytes).view(piece.dtype).reshape(piece.shape)
                np.copyto(whole, piece)
                piece = whole
            block = piece.reshape(-1).view(np.uint8).data
            self.checksum = crc32(block, self.checksum)
            yield block


class _Stretch:
    """The bytes of a chunk's file that a region needs: those of its rows."""

    def __init__(self, storage: Readable, region: Region) -> None:
        info = region.info
        coordinates = [a // n for a, n in zip(region.box.start, info.chunk_shape, strict=True)]
        self._location = storage.location(f"{region.array}/{info.grid.key_at(coordinates)}")
        self._info = info
        self._inside = tuple(
            slice(a - c * n, a - c * n + size)
            for a, c, n, size in zip(
                region.box.start, coordinates, info.chunk_shape, region.box.shape, strict=True
            )
        )
        rows = self._inside[0] if self._inside else slice(0, 1)
        self._shape = (rows.stop - rows.start, *info.chunk_shape[1:]) if self._inside else ()
        row_bytes = info.chunk_bytes // (info.chunk_shape[0] if self._inside else 1)
        self._start = rows.start * row_bytes
        self._num_bytes = (rows.stop - rows.start) * row_bytes

    def announce(self) -> None:
        """Let the system begin to read it, if it is worth a call."""
        if self._num_bytes >= LARGE:
            will_read(self._location, self._start, self._num_bytes)

    def read(self, scratch: _Scratch) -> Array:
        """Return the region's values, in the scratch memory.

        Raises:
            CheckpointError: the file is missing, unreadable, or not as long as the chunk.
        """
        into = scratch.of(self._num_bytes)
        array: Array = into.view(stored_type(self._info.dtype).zarr).reshape(self._shape)
        try:
            read_file(self._location, into.data, start=self._start, size=self._info.chunk_bytes)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read chunk {self._location}: {error}") from None
        return array[(slice(None), *self._inside[1:])] if self._inside else array


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

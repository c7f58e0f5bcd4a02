"""Chunks without compression, written straight into their files by several threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mcore_ckpt.dtypes import Array
from mcore_ckpt.engine import ChunkData
from mcore_ckpt.storage import Storage, write_file

_BATCH_CHUNKS = 64
_BATCH_BYTES = 8 << 20


class FileWriting:
    """Chunks on their way into files (a `Writing`).

    The file of such a chunk is its bytes. Nobody reads it before the commit, so it needs neither a
    lock nor a rename; for small chunks those cost several times what writing does.
    """

    def __init__(self, storage: Storage, chunks: Iterable[ChunkData], threads: int) -> None:
        """Start writing chunks into directories that exist."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mcore-ckpt-write")
        files = (
            (storage.location(f"{c.array}/{c.info.grid.key(c.number)}"), c.data) for c in chunks
        )
        self._futures: list[Future[None]] = [
            self._pool.submit(_write, batch) for batch in _batches(files)
        ]

    def wait(self) -> None:
        """Return when every chunk is written."""
        self._pool.shutdown()  # all of them, also after an error: their memory is in use
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()


def _write(files: list[tuple[str, Array]]) -> None:
    for location, data in files:
        try:
            write_file(location, data.reshape(-1).view(np.uint8).data)
        except OSError as error:
            text = f"cannot write chunk {location}: {error.strerror}"
            raise OSError(error.errno, text) from None


def _batches(files: Iterable[tuple[str, Array]]) -> Iterator[list[tuple[str, Array]]]:
    """Take small chunks together: handing one to a thread costs as much as writing it."""
    batch: list[tuple[str, Array]] = []
    size = 0
    for file in files:
        batch.append(file)
        size += file[1].nbytes
        if len(batch) == _BATCH_CHUNKS or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

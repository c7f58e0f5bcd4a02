"""The portable engine: zarr-python, over any storage. The one module that imports zarr."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from mcore_ckpt.checksum import checksum
from mcore_ckpt.documents import array_document
from mcore_ckpt.dtypes import Array
from mcore_ckpt.engine import ChunkData, Engine, Region, Writing
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.names import DOCUMENT
from mcore_ckpt.object_storage import ObjectStorage
from mcore_ckpt.storage import Readable, Storage

try:
    import zarr
    from zarr.abc.store import (
        ByteRequest,
        OffsetByteRequest,
        RangeByteRequest,
        Store,
        SuffixByteRequest,
    )
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.storage import StorePath
except ImportError as error:
    raise ImportError("the zarr engine needs it: pip install 'mcore-ckpt[zarr]'") from error


class ZarrEngine(Engine):
    """Reads and writes chunks as zarr-python does, through `Storage.get` and `Storage.put`.

    Slower than the others, and at home wherever a storage is. inflight_bytes: bound on the memory
    of chunks being read ahead. io_threads: chunks under way at once.
    """

    def __init__(self, *, inflight_bytes: int = 256 << 20, io_threads: int = 16) -> None:
        self.inflight_bytes = inflight_bytes
        self.io_threads = io_threads

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks (see `Engine.write`)."""
        return _Writing(storage, chunks, self.io_threads)

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead (see `Engine.read`)."""
        arrays: dict[tuple[str, tuple[int, ...]], Any] = {}
        waiting: deque[tuple[int, Future[Array]]] = deque()
        inflight = 0
        with ThreadPoolExecutor(self.io_threads, thread_name_prefix="mcore-ckpt-zarr") as pool:
            for region in regions:
                kind = (region.array, region.info.shape)
                if kind not in arrays:
                    arrays[kind] = _open(_Store(storage, region.array), region.info)
                size = region.info.chunk_bytes
                while waiting and inflight + size > self.inflight_bytes:
                    done, future = waiting.popleft()
                    inflight -= done
                    yield future.result()
                waiting.append((size, pool.submit(_read, storage, region, arrays[kind])))
                inflight += size
            while waiting:
                yield waiting.popleft()[1].result()


class _Writing:
    """Chunks on their way through zarr-python."""

    def __init__(self, storage: Storage, chunks: Iterable[ChunkData], threads: int) -> None:
        arrays: dict[str, Any] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mcore-ckpt-zarr")
        self._futures: list[Future[list[int]]] = []
        for chunk in chunks:
            if chunk.array not in arrays:
                # Without its edge every chunk is written whole, and none is read before.
                store = _Store(storage, chunk.array, new=True)
                arrays[chunk.array] = _open(store, chunk.info.padded)
            self._futures.append(self._pool.submit(_write, storage, chunk, arrays[chunk.array]))

    def wait(self) -> list[int]:
        """Return the checksums when every chunk is written."""
        self._pool.shutdown()  # all of them, also after an error: their memory is in use
        futures, self._futures = self._futures, []
        return [crc for future in futures for crc in future.result()]


class _Store(Store):
    """A storage of ours as a store of zarr's, below one array.

    A file that is absent is damage, but where they are `new`.
    """

    supports_writes = True
    supports_deletes = False
    supports_listing = False

    def __init__(self, storage: Any, array: str, *, new: bool = False) -> None:
        super().__init__()
        self._storage = storage
        self._new = new
        self._array = array

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if self._new:  # asked for a file that holds many chunks, before it is written
            return None
        start: int = 0
        stop: int | None = None
        match byte_range:
            case RangeByteRequest():
                start, stop = byte_range.start, byte_range.end
            case OffsetByteRequest():
                start = byte_range.offset
            case SuffixByteRequest():
                start = -byte_range.suffix
        data = await asyncio.to_thread(self._part, f"{self._array}/{key}", start, stop)
        return prototype.buffer.from_bytes(data)

    def _part(self, path: str, start: int, stop: int | None) -> bytes:
        if (start, stop) != (0, None) and isinstance(self._storage, ObjectStorage):
            return self._storage.get_part(path, start, stop)
        data: bytes = self._storage.get(path)
        return data[start:stop]

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return key != DOCUMENT

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self._storage.put, f"{self._array}/{key}", value.to_bytes())

    async def delete(self, key: str) -> None:
        raise NotImplementedError("chunks are not deleted one by one")

    async def list(self) -> AsyncIterator[str]:
        raise NotImplementedError("chunks are not listed")
        yield ""

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("chunks are not listed")
        yield ""

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("chunks are not listed")
        yield ""


def _open(store: _Store, info: TensorInfo) -> Any:
    document: Any = array_document(info)
    config: Any = {"write_empty_chunks": True}  # a chunk that is absent is damage, never zeros
    return zarr.Array(zarr.AsyncArray(document, StorePath(store), config))


def _read(storage: Readable, region: Region, array: Any) -> Array:
    try:
        found: Array = np.asarray(array[region.box.slices])
    except Exception as error:  # zarr and its codecs raise many kinds
        key = region.info.key(next(region.info.grid.overlapping(region.box)))
        where = storage.location(f"{region.array}/{key}")
        raise CheckpointError(f"cannot read chunk {where}: {error}") from None
    return found


def _write(storage: Storage, chunk: ChunkData, array: Any) -> list[int]:
    grid = chunk.info.padded.files
    box = grid.box(chunk.number)
    data = chunk.data[tuple(slice(0, n) for n in box.shape)]
    try:
        array[box.slices] = np.asarray(data, order="C")
    except Exception as error:
        where = storage.location(f"{chunk.array}/{grid.key(chunk.number)}")
        number = error.errno if isinstance(error, OSError) else None
        text = f"cannot write chunk {where}: {error}"
        raise (OSError(number, text) if number else OSError(text)) from None
    return [checksum(part) for part in chunk.chunks]

"""The engine that is used when none is given: plain files, and tensorstore for encoded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

from mcore_ckpt.dtypes import Array
from mcore_ckpt.engine import ChunkData, Engine, Region, Writing
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.object_storage import ObjectStorage
from mcore_ckpt.storage import Readable, Storage


class DefaultEngine(Engine):
    """Moves plain chunks as files (see `FileEngine`), and compressed ones through tensorstore.

    In object storage both go through the engine of that.
    """

    def __init__(self) -> None:
        self._files = FileEngine()

    @cached_property
    def _encoding(self) -> Engine:
        from mcore_ckpt.tensorstore_engine import TensorstoreEngine  # slow to import

        return TensorstoreEngine()

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks (see `Engine.write`)."""
        chunks = list(chunks)
        if isinstance(storage, ObjectStorage):
            return storage.engine().write(storage, chunks)
        if not any(chunk.info.is_encoded for chunk in chunks):
            return self._files.write(storage, chunks)
        return _Writing(self._files, self._encoding, storage, chunks)

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead (see `Engine.read`)."""
        if isinstance(storage, ObjectStorage):
            yield from storage.engine().read(storage, regions)
            return
        plain = [region for region in regions if not region.info.is_encoded]
        if len(plain) == len(regions):
            yield from self._files.read(storage, regions)
            return
        encoded = [region for region in regions if region.info.is_encoded]
        found = {
            False: self._files.read(storage, plain),
            True: self._encoding.read(storage, encoded),
        }
        for region in regions:
            yield next(found[region.info.is_encoded])

    def visit(
        self, storage: Readable, regions: Sequence[Region], take: Callable[[int, Array], None]
    ) -> None:
        """Call `take` with each region's number and contents (see `Engine.visit`)."""
        encoded = any(region.info.is_encoded for region in regions)
        if encoded or isinstance(storage, ObjectStorage):
            super().visit(storage, regions, take)
        else:
            self._files.visit(storage, regions, take)


class _Writing:
    """Chunks on their way, some as files and some encoded."""

    def __init__(
        self, files: Engine, encoding: Engine, storage: Storage, chunks: Sequence[ChunkData]
    ) -> None:
        self._counts = [
            (chunk.info.is_encoded, len(chunk.info.inside(chunk.number))) for chunk in chunks
        ]
        self._under_way = {
            encoded: engine.write(storage, [c for c in chunks if c.info.is_encoded is encoded])
            for encoded, engine in ((False, files), (True, encoding))
        }

    def wait(self) -> list[int]:
        """Return the checksums when every chunk is written."""
        found: dict[bool, Iterator[int]] = {}
        failed: OSError | None = None
        for encoded, writing in self._under_way.items():  # both: their memory is in use
            try:
                found[encoded] = iter(writing.wait())
            except OSError as error:
                failed = failed or error
        if failed:
            raise failed
        return [crc for encoded, count in self._counts for crc in islice(found[encoded], count)]

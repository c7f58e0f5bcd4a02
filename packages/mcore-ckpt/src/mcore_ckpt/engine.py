"""Engines move the chunks of arrays: many at once, in bounded memory, nothing about commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from mcore_ckpt.dtypes import Array
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.storage import Readable, Storage
from mcore_parallel.layout import Box


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkData:
    """One file to be written, a chunk or many (see `TensorInfo.files`), and its number.

    `data` has the full shape of that, zeros beyond the tensor's edge.

    It may have any strides: where a rank holds the whole chunk, it is a view of the rank's tensor.
    """

    array: str
    info: TensorInfo
    number: int
    data: Array

    @property
    def chunks(self) -> Iterator[Array]:
        """The contents of the chunks in it, in ascending order of their numbers."""
        grid, start = self.info.grid, self.info.files.box(self.number).start
        for number in self.info.inside(self.number):
            places = zip(grid.box(number).start, start, self.info.chunk_shape, strict=True)
            yield self.data[tuple(slice(at - b, at - b + n) for at, b, n in places)]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Part of an array to be read; inside one chunk, so that no chunk is read twice.

    info: the same for all regions of an array in one call. Its shape may be rounded up to whole
    chunks: then the box may reach beyond the tensor's edge, where the bytes of the chunk are wanted
    as they are stored.
    """

    array: str
    info: TensorInfo
    box: Box


class Writing(Protocol):
    """Chunks on their way to the storage. Their data must be left alone until `wait` returns."""

    def wait(self) -> Sequence[int]:
        """Return when all are written (not yet durable); raise OSError if one could not be.

        What it returns are the checksums (CRC-32, see `checksum.checksum`) of all `chunks`, in the
        order in which they were given: an engine has them in its hands anyway.
        """


class Engine(Protocol):
    """Writes and reads chunks. `array` is the path of an array within the storage.

    Engines inherit from it: what is written here in terms of the rest they may do better. One that
    moves chunks as they are, and none that are compressed, says so by `encodes`.
    """

    encodes: ClassVar[bool] = True

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks, each by nobody else, into arrays whose directories exist."""

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead.

        Raises:
            CheckpointError: a chunk is missing or unreadable; names the array and the chunk.
        """

    def visit(
        self, storage: Readable, regions: Sequence[Region], take: Callable[[int, Array], None]
    ) -> None:
        """Call `take` with each region's number and contents, in any order and in any threads.

        The array may be read until `take` returns, and is another one's afterwards.

        Raises:
            CheckpointError: as `read`.
            what `take` raises; other regions may have been taken by then, or not.
        """
        for number, array in enumerate(self.read(storage, regions)):
            take(number, array)

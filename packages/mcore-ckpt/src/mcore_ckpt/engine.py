"""Engines move the chunks of arrays: many at once, in bounded memory, nothing about commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_ckpt.dtypes import Array
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.storage import Readable, Storage
from mcore_parallel.layout import Box


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkData:
    """One chunk to be written: `data` has the full chunk shape, zeros beyond the tensor's edge."""

    array: str
    info: TensorInfo
    number: int
    data: Array


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

    def wait(self) -> None:
        """Return when all are written (not yet durable); raise OSError if one could not be."""


class Engine(Protocol):
    """Writes and reads chunks. `array` is the path of an array within the storage."""

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        """Start writing chunks, each by nobody else, into arrays whose directories exist."""

    def read(self, storage: Readable, regions: Sequence[Region]) -> Iterator[Array]:
        """Yield the regions in turn, reading ahead.

        Raises:
            CheckpointError: a chunk is missing or unreadable; names the array and the chunk.
        """

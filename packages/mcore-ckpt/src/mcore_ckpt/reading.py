"""Reading parts of tensors, with the checksum of every chunk that is touched.

A checksum is of all bytes of a chunk as they lie on disk, also of the zeros beyond the tensor's
edge. So to verify, chunks are read whole; what is asked for is cut out of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from mcore_ckpt.checksum import checksum
from mcore_ckpt.dtypes import Array, from_numpy
from mcore_ckpt.engine import Engine, Region
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.memory import check_room
from mcore_ckpt.storage import Readable
from mcore_parallel.layout import Box

_HASH_THREADS = 4  # as many chunks are held beyond those that the engine reads ahead


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of the global tensor `name` that lies within its chunk `number`."""

    name: str
    number: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads the tensors of one checkpoint of a storage.

    verify: compare chunks with checksums. stored: what tensors are called in the storage that the
    manifest has under other names.
    """

    storage: Readable
    checkpoint: str
    manifest: Manifest
    engine: Engine
    verify: bool
    stored: Mapping[str, str] = field(default_factory=dict)

    def read(self, parts: Sequence[Part]) -> Iterator[torch.Tensor]:
        """Yield the parts in turn as CPU tensors of the real dtype, reading ahead.

        Raises:
            CheckpointError: a chunk is missing or unreadable, or (with `verify`) its checksum is
                not the manifest's; names the array, the chunk and the file.
        """
        regions = self._regions(parts)
        arrays = self.engine.read(self.storage, regions)
        if self.verify:
            arrays = self._verified(parts, arrays)
        for part, region, array in zip(parts, regions, arrays, strict=True):
            yield cut_out(from_numpy(array, region.info.dtype), part.box, region.box)

    def visit(self, parts: Sequence[Part], take: Callable[[int, torch.Tensor], None]) -> None:
        """Call `take` with the number and contents of each part, in any order and in many threads.

        The tensor, as `read` yields it, is another one's when `take` returns.

        Raises:
            CheckpointError: as `read`; other parts may have been taken by then.
        """
        regions = self._regions(parts)

        def check(number: int, array: Array) -> None:
            part, region = parts[number], regions[number]
            if self.verify and checksum(array) != self._expected(part):
                raise self._damage(part)
            take(number, cut_out(from_numpy(array, region.info.dtype), part.box, region.box))

        self.engine.visit(self.storage, regions, check)

    def _regions(self, parts: Sequence[Part]) -> list[Region]:
        """Return what is read for the parts: to verify, their whole chunks."""
        tensors = self.manifest.tensors
        for name in {part.name for part in parts}:
            where = self.storage.location(f"{self.checkpoint}/{self.stored.get(name, name)}")
            check_room(tensors[name].chunk_bytes, f"a chunk of {where}")
        if not self.verify:
            return [
                Region(array=self._array(part), info=tensors[part.name], box=part.box)
                for part in parts
            ]
        padded = {name: tensors[name].padded for name in {part.name for part in parts}}
        return [
            Region(
                array=self._array(part),
                info=padded[part.name],
                box=padded[part.name].grid.box(part.number),
            )
            for part in parts
        ]

    def _verified(self, parts: Sequence[Part], arrays: Iterator[Array]) -> Iterator[Array]:
        """Yield whole chunks when their checksums have been found right."""
        waiting: deque[tuple[Part, Array, Future[int]]] = deque()

        def first() -> Array:
            part, array, found = waiting.popleft()
            if found.result() != self._expected(part):
                raise self._damage(part)
            return array

        with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="mcore-ckpt-hash") as pool:
            for part, array in zip(parts, arrays, strict=True):
                waiting.append((part, array, pool.submit(checksum, array)))
                if len(waiting) > _HASH_THREADS:
                    yield first()
            while waiting:
                yield first()

    def _expected(self, part: Part) -> int:
        return self.manifest.tensors[part.name].crc32[part.number]

    def _array(self, part: Part) -> str:
        return f"{self.checkpoint}/{self.stored.get(part.name, part.name)}"

    def _damage(self, part: Part) -> CheckpointError:
        grid = self.manifest.tensors[part.name].grid
        path = f"{self._array(part)}/{self.manifest.tensors[part.name].key(part.number)}"
        return CheckpointError(
            f"tensor {part.name} chunk {list(grid.coordinates(part.number))}: "
            f"{self.storage.location(path)} is damaged: its checksum is not the manifest's"
        )


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of `box` within a tensor that is `outer`."""
    return tuple(
        slice(a - b, a - b + n) for a, b, n in zip(box.start, outer.start, box.shape, strict=True)
    )


def cut_out(data: torch.Tensor, box: Box, outer: Box) -> torch.Tensor:
    """Return the part `box` of a tensor that is `outer`."""
    return data if box == outer else data[inside(box, outer)]

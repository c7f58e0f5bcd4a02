"""How a global tensor is cut into chunks: from its shape alone, never from who holds what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_parallel.layout import Box

DEFAULT_CHUNK_BYTES = 8 << 20
_SMALL = 1 << 20  # bytes: chunks of at most this many are not cut for the sake of shards
_SHARDS = 8


def chunk_shape(
    shape: Sequence[int], itemsize: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the shape of the chunks of a tensor of `shape`: at most `chunk_bytes` each.

    A tensor that fits is one chunk. Otherwise extents are halved: first the leading axes of a
    tensor of three or more dimensions (they stack experts, which are held apart), then the longer
    of the last two, rows when equal. Halves of halves are what tensor-parallel shards are, in rows
    and in columns, so that a shard is made of whole chunks. Chunks of a matrix that would still be
    above 1 MiB are halved on until rows and columns are cut in eight: a rank then reads its shard
    of up to eight, and nothing else.
    """
    extents = [max(1, n) for n in shape]
    limit = max(1, chunk_bytes // itemsize)

    def halve(dim: int) -> None:
        extents[dim] = -(-extents[dim] // 2)

    for dim in range(len(extents) - 2):
        while math.prod(extents) > limit and extents[dim] > 1:
            halve(dim)
    last = range(max(0, len(extents) - 2), len(extents))
    while math.prod(extents) > limit:
        halve(max(last, key=lambda dim: (extents[dim], -dim)))
    if len(extents) > 1 and math.prod(extents[:-2]) == 1:
        small = _SMALL // itemsize
        while math.prod(extents) > small:
            uncut = [dim for dim in last if extents[dim] > -(-shape[dim] // _SHARDS)]
            if not uncut:
                break
            halve(max(uncut, key=lambda dim: (extents[dim], -dim)))
    return tuple(extents)


def file_shape(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, file_bytes: int
) -> tuple[int, ...] | None:
    """Return the shape of the files of many chunks each that hold a tensor of `shape`.

    A multiple of the chunk's, at most `file_bytes`, as nearly cut alike in all dimensions as
    doubling makes it; None: a file has room for one chunk alone.
    """
    counts = [max(1, n) for n in Grid(tuple(shape), tuple(chunk)).counts]
    factors = [1] * len(counts)
    while True:
        left = [dim for dim, count in enumerate(counts) if factors[dim] < count]
        if not left:
            break
        dim = max(left, key=lambda dim: (counts[dim] / factors[dim], dim))
        more = min(2 * factors[dim], counts[dim])
        size = math.prod(chunk) * itemsize * math.prod(factors) // factors[dim] * more
        if size > file_bytes:
            break
        factors[dim] = more
    if all(factor == 1 for factor in factors):
        return None
    return tuple(n * factor for n, factor in zip(chunk, factors, strict=True))


@dataclass(frozen=True)
class Grid:
    """The regular grid of chunks over a tensor. Chunks are numbered in row-major order."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks along each dimension (0 where the tensor is empty)."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 1 for a scalar, 0 for a tensor without elements."""
        return math.prod(self.counts)

    def coordinates(self, number: int) -> tuple[int, ...]:
        """Return the grid coordinates of chunk `number`."""
        result = []
        for count in reversed(self.counts):
            number, c = divmod(number, count)
            result.append(c)
        return tuple(reversed(result))

    def number(self, coordinates: Sequence[int]) -> int:
        """Return the number of the chunk at these grid coordinates."""
        number = 0
        for c, count in zip(coordinates, self.counts, strict=True):
            number = number * count + c
        return number

    def box(self, number: int) -> Box:
        """Return the part of the tensor in chunk `number`: smaller than a chunk at the edges."""
        start = tuple(
            c * n for c, n in zip(self.coordinates(number), self.chunk_shape, strict=True)
        )
        shape = tuple(
            min(n, size - a) for a, n, size in zip(start, self.chunk_shape, self.shape, strict=True)
        )
        return Box(start, shape)

    def key(self, number: int) -> str:
        """Return the chunk's file name within its array (zarr's `default` encoding with '.')."""
        return self.key_at(self.coordinates(number))

    @staticmethod
    def key_at(coordinates: Sequence[int]) -> str:
        """Return the file name of the chunk at these grid coordinates."""
        return ".".join(("c", *map(str, coordinates)))

    def overlapping(self, box: Box) -> Iterator[int]:
        """Yield the numbers of the chunks that hold some element of `box`."""
        if not box.numel:
            return
        spans = (
            range(a // n, (b - 1) // n + 1)
            for a, b, n in zip(box.start, box.stop, self.chunk_shape, strict=True)
        )
        for coordinates in itertools.product(*spans):
            yield self.number(coordinates)

"""Axis-aligned boxes of integer points, and the two ways of cutting them that layouts need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import mul


@dataclass(frozen=True, slots=True)
class Box:
    """The points `start[i] ≤ x[i] < start[i] + shape[i]` of a tensor's index space."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.shape):
            raise ValueError(f"box start {self.start} and shape {self.shape} differ in length")
        if (self.shape and min(self.shape) < 0) or (self.start and min(self.start) < 0):
            raise ValueError(f"box start {self.start} and shape {self.shape} must not be negative")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of `shape`."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index along each dimension."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Number of points."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects this box of a whole tensor: `tensor[box.slices]`."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common points as a box, or None when there are none."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low = a if a > b else b
            size = min(a + n, b + m) - low
            if size <= 0:
                return None
            start.append(low)
            shape.append(size)
        return Box(tuple(start), tuple(shape))

    def contains(self, other: Box) -> bool:
        """Return whether every point of `other` lies in this box."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )

    def subtract(self, other: Box) -> list[Box]:
        """Return the points of this box outside `other` as at most `2 · dims` disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        pieces = []
        start, stop = list(self.start), list(self.stop)
        for i, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            for a, b in ((start[i], low), (high, stop[i])):
                if a < b:
                    piece_start = (*start[:i], a, *start[i + 1 :])
                    piece_stop = (*stop[:i], b, *stop[i + 1 :])
                    sizes = tuple(q - p for p, q in zip(piece_start, piece_stop, strict=True))
                    pieces.append(Box(piece_start, sizes))
            start[i], stop[i] = low, high
        return pieces

    def __str__(self) -> str:
        spans = (f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True))
        return f"[{', '.join(spans)}]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`."""
    strides, step = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i] = step
        step *= shape[i]
    return tuple(strides)


def dot(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the sum of the products of two equally long integer vectors."""
    return sum(map(mul, a, b))


def interval_boxes(
    shape: Sequence[int], weights: Sequence[int], low: int, high: int
) -> Iterator[Box]:
    """Cut the points `x` of `Box.whole(shape)` with `low ≤ Σ x[i]·weights[i] < high` into boxes.

    Weights are not negative. The dimension of the largest weight comes first: the indices along
    it for which everything below is inside make one block, and the few at both ends recurse. With
    row-major weights that gives prefix, block and suffix (at most `2·dims − 1` boxes); other
    weights stay correct and may need more.
    """
    if not math.prod(shape):
        return
    moving = [weight > 0 and size > 1 for weight, size in zip(weights, shape, strict=True)]
    order = sorted(compress(range(len(shape)), moving), key=lambda i: -weights[i])
    spans = [0]  # spans[-1 - k]: the largest sum that the dimensions from order[k] on can reach
    for i in reversed(order):
        spans.append(spans[-1] + (shape[i] - 1) * weights[i])
    start, sizes = [0] * len(shape), list(shape)

    def cut(depth: int, low: int, high: int) -> Iterator[Box]:
        if low <= 0 and spans[-1 - depth] < high:
            yield Box(tuple(start), tuple(sizes))
            return
        if depth == len(order):
            return
        i, rest = order[depth], spans[-2 - depth]
        weight, size = weights[i], shape[i]
        first = max(0, -((rest - low) // weight))  # some point below reaches `low`
        last = min(size - 1, (high - 1) // weight)  # some point below stays under `high`
        full_first = max(first, -(-low // weight))  # all points below do
        full_last = min(last, (high - 1 - rest) // weight)
        if full_first > full_last:
            full_first, full_last = last + 1, last
        for x in range(first, full_first):
            start[i], sizes[i] = x, 1
            yield from cut(depth + 1, low - x * weight, high - x * weight)
        if full_first <= full_last:
            start[i], sizes[i] = full_first, full_last - full_first + 1
            yield Box(tuple(start), tuple(sizes))
        for x in range(full_last + 1, last + 1):
            start[i], sizes[i] = x, 1
            yield from cut(depth + 1, low - x * weight, high - x * weight)
        start[i], sizes[i] = 0, size

    yield from cut(0, low, high)

"""One box of a named global tensor and where its elements lie in a local tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_parallel.layout.box import Box, dot, interval_boxes, row_major_strides


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A box of a named global tensor and the strided place of its elements in local storage.

    Element `g` of the box (counted from `box.start`) of the contiguous local tensor is
    `local.view(-1)[offset + Σ g[i]·strides[i]]`. One rule covers sub-boxes, fused weights,
    transposes, steps and flat slices. `replica` of `num_replicas` says which of several equal
    copies this one is.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    offset: int
    strides: tuple[int, ...]
    replica: int = 0
    num_replicas: int = 1

    def __post_init__(self) -> None:
        box, shape = self.box, self.global_shape
        if not len(shape) == len(box.shape) == len(self.strides):
            raise ValueError(
                f"{self.name}: global shape {shape}, box {box} and strides {self.strides} "
                "differ in number of dimensions"
            )
        for a, n, size, stride in zip(box.start, box.shape, shape, self.strides, strict=True):
            if a + n > size:
                raise ValueError(f"{self.name}: box {box} leaves the global shape {list(shape)}")
            if stride < 0 or (stride == 0 and n > 1 and box.numel):
                raise ValueError(
                    f"{self.name}: strides {self.strides} of box {box} must be positive where the "
                    "box is longer than 1"
                )
        if not 0 <= self.replica < self.num_replicas:
            raise ValueError(
                f"{self.name}: replica {self.replica} must lie in 0…{self.num_replicas - 1}"
            )

    @property
    def last(self) -> int:
        """The largest local address (meaningless when the box is empty)."""
        return self.offset + sum(
            (n - 1) * s for n, s in zip(self.box.shape, self.strides, strict=True)
        )

    def cut(self, box: Box) -> Fragment:
        """Return the part that holds `box` (global coordinates, inside this fragment's box)."""
        inner = (a - b for a, b in zip(box.start, self.box.start, strict=True))
        return replace(self, box=box, offset=self.offset + dot(tuple(inner), self.strides))

    def within(self, weights: Sequence[int], low: int, high: int) -> Iterator[Fragment]:
        """Yield the parts whose box-relative points have `low ≤ Σ g[i]·weights[i] < high`."""
        for piece in interval_boxes(self.box.shape, weights, low, high):
            start = tuple(a + b for a, b in zip(self.box.start, piece.start, strict=True))
            yield self.cut(Box(start, piece.shape))


@dataclass(frozen=True, slots=True)
class LocalMotion:
    """A fragment with its addresses written as coordinates of the local tensor.

    Element `g` of the box lies at local coordinates `origin + Σ g[i]·steps[i]`.
    """

    fragment: Fragment
    origin: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    def placed(self, offset: int, strides: Sequence[int]) -> Fragment:
        """Return the fragment in a storage with local coordinate `x` at `offset + x·strides`."""
        return replace(
            self.fragment,
            offset=offset + dot(self.origin, strides),
            strides=tuple(dot(step, strides) for step in self.steps),
        )


def _digits(address: int, strides: Sequence[int]) -> tuple[int, ...]:
    digits = []
    for stride in strides:
        digits.append(address // stride)
        address %= stride
    return tuple(digits)


def local_motions(fragment: Fragment, shape: Sequence[int]) -> Iterator[LocalMotion]:
    """Write a fragment of a local tensor of `shape` as motions through local coordinates.

    Nearly always one motion. Where a step along the box would carry from one local dimension into
    the next (a 1-D box that runs over the rows of a matrix), the fragment is cut at the rows.
    """
    if not fragment.box.numel:
        return
    strides = row_major_strides(shape)
    zero = (0,) * len(shape)
    origin = _digits(fragment.offset, strides)
    steps = tuple(
        _digits(stride, strides) if n > 1 else zero
        for n, stride in zip(fragment.box.shape, fragment.strides, strict=True)
    )
    reach = (
        origin[k]
        + sum((n - 1) * step[k] for n, step in zip(fragment.box.shape, steps, strict=True))
        for k in range(len(shape))
    )
    if all(end < size for end, size in zip(reach, shape, strict=True)):
        yield LocalMotion(fragment, origin, steps)
        return
    row = math.prod(shape[1:])
    for r in range(fragment.offset // row, fragment.last // row + 1):
        low = r * row - fragment.offset
        for piece in fragment.within(fragment.strides, low, low + row):
            inside = replace(piece, offset=piece.offset - r * row)
            for motion in local_motions(inside, shape[1:]):
                part = replace(motion.fragment, offset=motion.fragment.offset + r * row)
                inner_steps = tuple((0, *step) for step in motion.steps)
                yield LocalMotion(part, (r, *motion.origin), inner_steps)

"""How two checkpoints differ, tensor by tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.addresses import Place
from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.progress import Advance
from mcore_ckpt.selection import Selection


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Where one tensor of two checkpoints differs.

    dtypes: of both. max_error: the largest absolute difference of two elements; infinite where one
    is not a number and the other is. num_different: elements of other value, of num_elements.
    """

    name: str
    dtypes: tuple[str, str]
    max_error: float
    num_different: int
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two checkpoints differ.

    only_first, only_second: names that the other one lacks. shapes: what has another shape, with
    both. tensors: those that both have in one shape and that differ in a value or in dtype.
    """

    first: Place
    second: Place
    num_compared: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    shapes: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]

    def within(self, tolerance: float) -> bool:
        """Return whether nothing differs by more than `tolerance`; 0: nothing differs at all."""
        if self.only_first or self.only_second or self.shapes:
            return False
        return all(t.max_error <= tolerance and (tolerance or not _other(t)) for t in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values (an infinite error as text)."""
        return {
            "first": str(self.first),
            "second": str(self.second),
            "compared": self.num_compared,
            "only_first": list(self.only_first),
            "only_second": list(self.only_second),
            "shapes": list(self.shapes),
            "tensors": {
                t.name: {
                    "dtypes": list(t.dtypes),
                    "max_error": t.max_error if math.isfinite(t.max_error) else "inf",
                    "different": t.num_different,
                    "elements": t.num_elements,
                }
                for t in self.tensors
            },
        }


def compare_checkpoints(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    patterns: Sequence[str] | None = None,
    advance: Advance | None = None,
) -> Comparison:
    """Return how two checkpoints (or the newest ones of two directories) differ.

    Values are compared as numbers, in whatever dtype they are stored; two NaNs are equal. Chunk by
    chunk: little is in memory at a time.

    patterns: only tensors whose names match one of them.
    advance: told of the bytes of the first that have been compared.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        ValueError: a pattern matches no tensor of either.
        CheckpointError: one is damaged.
    """
    a, b = Checkpoint(first), Checkpoint(second)
    names = Selection(patterns=patterns).of(sorted({*a, *b}))
    both = [name for name in names if name in a and name in b]
    shapes = [name for name in both if a.info(name).shape != b.info(name).shape]
    differences = []
    for name in both:
        if name not in shapes:
            difference = _compare(a, b, name, advance)
            if difference.num_different or _other(difference):
                differences.append(difference)
    return Comparison(
        first=a.path,
        second=b.path,
        num_compared=len(both) - len(shapes),
        only_first=tuple(name for name in names if name not in b),
        only_second=tuple(name for name in names if name not in a),
        shapes=tuple(
            f"{name} {list(a.info(name).shape)} and {list(b.info(name).shape)}" for name in shapes
        ),
        tensors=tuple(differences),
    )


def _other(difference: TensorDifference) -> bool:
    """Whether something differs that an error of 0 does not tell: the dtype."""
    return difference.dtypes[0] != difference.dtypes[1]


def _compare(a: Checkpoint, b: Checkpoint, name: str, advance: Advance | None) -> TensorDifference:
    info = a.info(name)
    largest, count = 0.0, 0
    for number in range(info.grid.num_chunks):
        box = info.grid.box(number)
        x, y = a.read(name, box), b.read(name, box)
        error, different = _difference(x, y)
        largest, count = max(largest, error), count + different
        if advance:
            advance(x.numel() * x.element_size())
    return TensorDifference(
        name=name,
        dtypes=(info.dtype, b.info(name).dtype),
        max_error=largest,
        num_different=count,
        num_elements=math.prod(info.shape),
    )


def _difference(x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
    """Return the largest error of two tensors and the number of elements that differ."""
    if x.is_complex() or y.is_complex():
        x, y = x.to(torch.complex128), y.to(torch.complex128)
    elif x.dtype == y.dtype and not x.is_floating_point():
        different = x != y
        if not different.any():
            return 0.0, 0
        # Exact where float64 is not: large integers that differ by one.
        pairs = zip(x[different].tolist(), y[different].tolist(), strict=True)
        return float(max(abs(p - q) for p, q in pairs)), int(different.sum())
    else:
        x, y = x.double(), y.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if same.all():
        return 0.0, 0
    gaps = (x - y).abs()[~same]
    largest = float(gaps.nan_to_num(nan=math.inf, posinf=math.inf).max())
    return largest, int((~same).sum())

"""Rows sorted by expert: which are whose, and what is added to each expert's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from torch import Tensor


def rows_of(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which."""
    for i, (stop, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
        if count:
            yield i, slice(stop - count, stop)


def add_bias(y: Tensor, bias: Tensor | None, counts: Sequence[int]) -> None:
    """Add to each expert's rows of y [R, O] its bias, of [e, O]."""
    if bias is not None:
        for i, rows in rows_of(counts):
            y[rows] += bias[i]


def bias_gradient(dy: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum [e, O] of each expert's rows of dy [R, O]."""
    db = dy.new_zeros(len(counts), dy.shape[1])
    for i, rows in rows_of(counts):
        db[i] = dy[rows].sum(0)
    return db

"""Rows sorted by expert: which are whose, and what is added to each expert's.

R rows, e experts, O features. Counts are numbers on the host or a tensor [e] on the device of the
rows: then nothing here but `rows_of` brings them to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

Counts: TypeAlias = Sequence[int] | Tensor
"""How many rows each expert has."""

_AT_ONCE = 2**26
"""Numbers that are widened together."""


def rows_of(counts: Counts) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which; a tensor of counts is read back for it."""
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    for i, (stop, count) in enumerate(zip(accumulate(numbers), numbers, strict=True)):
        if count:
            yield i, slice(stop - count, stop)


def add_bias(y: Tensor, bias: Tensor | None, counts: Counts) -> None:
    """Add to each expert's rows of y [R, O] its bias, of [e, O]."""
    if bias is not None:
        lengths = _on_device(counts, y.device)
        experts = torch.arange(len(lengths), device=y.device)
        y += bias.index_select(0, experts.repeat_interleave(lengths, output_size=y.shape[0]))


def bias_gradient(dy: Tensor, counts: Counts) -> Tensor:
    """The sum [e, O] of each expert's rows of dy [R, O], at the precision of fp32 at least."""
    lengths = _on_device(counts, dy.device)
    wide = torch.promote_types(dy.dtype, torch.float32)
    sums = [
        # Unsafe: without a check of the lengths, which would read them.
        torch.segment_reduce(part.to(wide).contiguous(), "sum", lengths=lengths, unsafe=True)
        for part in torch.split(dy, max(1, _AT_ONCE // max(1, dy.shape[0])), dim=1)
    ]
    return torch.cat(sums, 1).to(dy.dtype)


def _on_device(counts: Counts, device: torch.device) -> Tensor:
    if isinstance(counts, Tensor):
        return counts
    return torch.tensor(counts, dtype=torch.int64, device=device)

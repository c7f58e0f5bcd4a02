"""Products per expert in numbers of 8 bits, one expert after another.

R rows sorted by expert, C columns, E experts, P places of rows across (`places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mcore_kernels.ops.fp8_matmul.reference import fp8_matmul
from mcore_kernels.ops.grouped_linear.base import slices
from mcore_kernels.ops.quantize.reference import QUANTIZE
from mcore_kernels.protocols.quant import Counts, Numbers
from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import Block, block_amax

ROOM = 128
"""Across, an expert's rows begin at a multiple of this."""


class ReferenceFp8Grouped:
    """`mcore_kernels.protocols.Fp8GroupedOp` in plain torch; counts are read back."""

    @torch.no_grad()
    def amax(self, x: Tensor, counts: Counts | None) -> Tensor:
        """See `Fp8GroupedOp`."""
        if counts is None:
            return torch.stack([block_amax(w, (0, 0)).view(()) for w in x])
        found = x.new_zeros(len(counts), dtype=torch.float32)
        for i, rows in slices(counts, x.shape[0]):
            found[i] = block_amax(x[rows], (0, 0)).view(())
        return found

    @torch.no_grad()
    def encode(
        self,
        x: Tensor,
        counts: Counts | None,
        fmt: Format,
        block: Block,
        *,
        along: bool = True,
        across: bool = True,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Numbers | None, Numbers | None]:
        """See `Fp8GroupedOp`."""

        def one(part: Tensor, i: int) -> Numbers:
            own = None if scale is None else scale[i].view(1, 1)
            return QUANTIZE(part, fmt, block, scale=own, margin=margin, power_of_two=power_of_two)

        if counts is None:
            return (
                _stacked([one(w, i) for i, w in enumerate(x)]) if along else None,
                _stacked([one(w.t(), i) for i, w in enumerate(x)]) if across else None,
            )
        return (
            _rows_along(x, counts, fmt, block, one) if along else None,
            _rows_across(x, counts, fmt, block, one) if across else None,
        )

    @torch.no_grad()
    def product(
        self,
        x: Numbers,
        weight: Numbers,
        counts: Counts,
        *,
        x_block: Block,
        weight_block: Block,
        dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:
        """See `Fp8GroupedOp`."""
        y = x[0].new_empty(x[0].shape[0], weight[0].shape[1], dtype=dtype)
        for i, rows in slices(counts, x[0].shape[0]):
            scale = x[1][i : i + 1] if x_block == (0, 0) else x[1][rows]
            y[rows] = fp8_matmul(
                x[0][rows], scale, weight[0][i], weight[1][i],
                a_block=x_block, b_block=weight_block, dtype=dtype, fast=fast,
            )  # fmt: skip
        return y

    @torch.no_grad()
    def weight_grad(
        self, dy: Numbers, x: Numbers, counts: Counts, *, block: Block, out: Tensor
    ) -> None:
        """See `Fp8GroupedOp`."""
        wide = torch.promote_types(out.dtype, torch.float32)
        for i, at in places(counts):
            a, b = ((data[:, at], _of_expert(s, i, at, block)) for data, s in (dy, x))
            product = fp8_matmul(*a, *b, a_block=block, b_block=block, dtype=wide)
            out[i] += product


def places(counts: Counts) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and where they lie across."""
    numbers = counts.tolist() if isinstance(counts, Tensor) else counts
    start = 0
    for i, count in enumerate(numbers):
        if count:
            yield i, slice(start, start + count)
        start += -(-count // ROOM) * ROOM


def num_places(counts: Counts, rows: int) -> int:
    """P: enough for all rows across; a tensor of counts is not read back for it."""
    if isinstance(counts, Tensor):
        return (rows // ROOM + min(len(counts), rows)) * ROOM
    return sum(-(-count // ROOM) * ROOM for count in counts)


def across_scales(columns: int, experts: int, places: int, block: Block) -> tuple[int, int]:
    """The shape of the scales of rows across."""
    if block == (0, 0):
        return experts, 1
    return (columns, experts) if block == (1, 0) else (columns, places // ROOM)


def _rows_along(
    x: Tensor, counts: Counts, fmt: Format, block: Block, one: Callable[[Tensor, int], Numbers]
) -> Numbers:
    y = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    width = -(-x.shape[1] // block[1]) if block[1] else 1
    s = x.new_ones(len(counts) if block == (0, 0) else x.shape[0], width, dtype=torch.float32)
    for i, rows in slices(counts, x.shape[0]):
        y[rows], s[slice(i, i + 1) if block == (0, 0) else rows] = one(x[rows], i)
    return y, s


def _rows_across(
    x: Tensor, counts: Counts, fmt: Format, block: Block, one: Callable[[Tensor, int], Numbers]
) -> Numbers:
    width = num_places(counts, x.shape[0])
    y = torch.zeros(x.shape[1], width, dtype=torch.uint8, device=x.device).view(fmt.dtype)
    shape = across_scales(x.shape[1], len(counts), width, block)
    s = x.new_ones(shape, dtype=torch.float32)
    for (i, rows), (_, at) in zip(slices(counts, x.shape[0]), places(counts), strict=True):
        y[:, at], scale = one(x[rows].t(), i)
        _of_expert(s, i, at, block).copy_(scale)
    return y, s


def _of_expert(scale: Tensor, i: int, at: slice, block: Block) -> Tensor:
    """An expert's part of the scales of rows across, as of a matrix by itself."""
    if block == (0, 0):
        return scale[i : i + 1]
    if block == (1, 0):
        return scale[:, i : i + 1]
    return scale[:, at.start // ROOM : -(-at.stop // ROOM)]


def _stacked(found: list[Numbers]) -> Numbers:
    return torch.stack([y for y, _ in found]), torch.stack([s for _, s in found])


GROUPED = ReferenceFp8Grouped()
"""The operator; it holds no state."""

"""Permuting tokens in plain torch, with gradients that are gathers too.

Autograd of indexing would add up at the tokens, on a GPU in an order that differs from run to run.
T tokens, k copies of each, H hidden, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.moe_permute.assignment import Assignment
from mcore_kernels.protocols import accumulation_dtype


class ReferencePermute:
    """`mcore_kernels.protocols.MoePermuteOp` in plain torch."""

    def permute(self, x: Tensor, assignment: Assignment) -> Tensor:
        """See `MoePermuteOp`."""
        return _Permute.apply(x, assignment.order, assignment.places)  # type: ignore[no-untyped-call,no-any-return]

    def unpermute(self, rows: Tensor, weights: Tensor | None, assignment: Assignment) -> Tensor:
        """See `MoePermuteOp`."""
        return _Unpermute.apply(rows, weights, assignment.order, assignment.places)  # type: ignore[no-untyped-call,no-any-return]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _gather(x, None, order, places.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return _combine(grads[0], None, places), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor | None, order: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        return _combine(rows, weights, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order, places = ctx.saved_tensors
        dy = grads[0]
        drows = _gather(dy, weights, order, places.shape[1])
        if weights is None:
            return drows, None, None, None
        wide = accumulation_dtype(rows.dtype)
        products = _copies(rows, places).to(wide) * dy.to(wide).unsqueeze(1)
        return drows, products.sum(-1).to(weights.dtype), None, None


def _gather(x: Tensor, weights: Tensor | None, order: Tensor, copies: int) -> Tensor:
    """x [T, H] at the tokens of the rows, times the weight of the copy → [R, H]."""
    rows = x.index_select(0, order.div(copies, rounding_mode="floor"))
    if weights is None:
        return rows
    wide = accumulation_dtype(x.dtype)
    return (rows.to(wide) * weights.flatten()[order].unsqueeze(1)).to(x.dtype)


def _combine(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """The sum over a token's copies of rows [R, H], weighted → [T, H]."""
    copies = _copies(rows, places).to(accumulation_dtype(rows.dtype))
    if weights is not None:
        copies = copies * weights.unsqueeze(-1)
    return copies.sum(1).to(rows.dtype)


def _copies(rows: Tensor, places: Tensor) -> Tensor:
    """[T, k, H]: the row of each copy, zeros where it was dropped."""
    if not rows.shape[0]:
        return rows.new_zeros(*places.shape, rows.shape[1])
    found = rows.index_select(0, places.flatten().clamp_min(0)).view(*places.shape, -1)
    return torch.where((places >= 0).unsqueeze(-1), found, 0.0)

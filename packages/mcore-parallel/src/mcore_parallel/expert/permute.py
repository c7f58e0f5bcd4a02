"""Copies of tokens in the order of rows, and back: what a kernel may take over.

An order names each row once, so that gradients are gathers too. Autograd of plain indexing would
add up instead, on a GPU in an order that differs from run to run.
N tokens, k copies of each, H their width, R rows; copy c is copy c % k of token c // k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

__all__ = ["PermuteOp", "RowOrder", "TorchPermute"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowOrder:
    """Which copy stands in which row: both ways, int64.

    order: the copy in each row [R]. places: the row of each copy [N, k]; -1 where it has none.
    """

    order: Tensor
    places: Tensor

    @staticmethod
    def of(order: Tensor, size: int, copies: int = 1) -> RowOrder:
        """The order of rows that are the copies `order` [R] of `size` = N·k, each at most once."""
        rows = torch.arange(order.numel(), device=order.device)
        places = torch.full((size,), -1, dtype=torch.int64, device=order.device)
        return RowOrder(order=order, places=places.scatter_(0, order, rows).view(-1, copies))


class PermuteOp(Protocol):
    """Moves tokens to rows and back. With gradients; results are fresh tensors."""

    def permute(self, x: Tensor, order: RowOrder, /) -> Tensor:
        """Return the rows [R, H]: row r is the token of copy `order.order[r]`, of x [N, H]."""

    def unpermute(self, rows: Tensor, weights: Tensor | None, order: RowOrder, /) -> Tensor:
        """Return for each token the sum [N, H] of its rows, weighted by `weights` [N, k] if given.

        rows [R, H]. Summed at the precision of rows and weights together, and returned in the dtype
        of the rows. Copies that have no row add nothing, whatever their weight.
        """


class TorchPermute:
    """`PermuteOp` by plain indexing."""

    def permute(self, x: Tensor, order: RowOrder, /) -> Tensor:
        """See `PermuteOp`."""
        return cast(Tensor, _Permute.apply(x, order))  # type: ignore[no-untyped-call]

    def unpermute(self, rows: Tensor, weights: Tensor | None, order: RowOrder, /) -> Tensor:
        """See `PermuteOp`."""
        return cast(Tensor, _Unpermute.apply(rows, weights, order))  # type: ignore[no-untyped-call]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return x.index_select(0, _token_of_row(order))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_copies(_by_copy(grad, ctx.order), None), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, order: RowOrder) -> Tensor:
        ctx.order, ctx.dtype = order, rows.dtype
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weights)
        return _sum_of_copies(_by_copy(rows, order), weights).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        order: RowOrder = ctx.order
        d_rows = d_weights = None
        if ctx.needs_input_grad[0]:
            d_rows = grad.index_select(0, _token_of_row(order))
            if weights is not None:
                d_rows = d_rows * weights.reshape(-1).index_select(0, order.order).unsqueeze(-1)
            d_rows = d_rows.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            products = _by_copy(rows, order) * grad.unsqueeze(1).to(weights.dtype)
            d_weights = products.sum(-1).to(weights.dtype)
        return d_rows, d_weights, None


def _token_of_row(order: RowOrder) -> Tensor:
    copies = order.places.shape[1]
    return order.order if copies == 1 else order.order.div(copies, rounding_mode="floor")


def _by_copy(rows: Tensor, order: RowOrder) -> Tensor:
    """The rows [N, k, ...] of all copies; zeros for those that have none."""
    places, shape = order.places, (*order.places.shape, *rows.shape[1:])
    if places.numel() == order.order.numel():
        return rows.index_select(0, places.flatten()).view(shape)
    if not rows.shape[0]:
        return rows.new_zeros(shape)
    found = rows.index_select(0, places.flatten().clamp(min=0)).view(shape)
    missing = (places < 0).view(*places.shape, *[1] * (rows.dim() - 1))
    return found.masked_fill(missing, 0)


def _sum_of_copies(copies: Tensor, weights: Tensor | None) -> Tensor:
    if weights is not None:
        copies = copies * weights.unsqueeze(-1)
    return copies.squeeze(1) if copies.shape[1] == 1 else copies.sum(1)

"""Moving rows to other places, with gradients that are gathers too.

An index that names each row once makes the gradient a gather by the inverse index. Autograd of
plain indexing would add up instead, on a GPU in an order that differs from run to run.
N tokens, k copies of each.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["copies_in_order", "in_order", "inverse_of"]


def inverse_of(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order` [R]."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def in_order(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return row order[i] of `x` [R, ...] at place i; `order` is a permutation."""
    return cast(Tensor, _InOrder.apply(x, order, inverse))  # type: ignore[no-untyped-call]


def copies_in_order(x: Tensor, copies: int, order: Tensor, inverse: Tensor) -> Tensor:
    """Return [N·k, ...]: at place i copy number order[i], where copy c is row c // k of `x`."""
    return cast(Tensor, _CopiesInOrder.apply(x, copies, order, inverse))  # type: ignore[no-untyped-call]


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        return in_order(grad, inverse, order), None, None


class _CopiesInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order.div(copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        by_copy = in_order(grad, inverse, order)
        by_row = by_copy.view(len(grad) // ctx.copies, ctx.copies, *grad.shape[1:])
        return by_row.sum(1), None, None, None

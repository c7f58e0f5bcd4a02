"""Norms whose sums are taken in one order, whatever else is in the batch.

How a library sums a row depends on how many rows there are: with few of them, several threads share
one. Here a row is folded in the middle until one number is left, by additions of elements alone,
whose results depend on their two arguments only.

Shapes: H hidden; "…" any leading shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    wide = x.to(accumulation_dtype(x.dtype))
    normed = _scaled(wide, eps)
    return (normed if weight is None else normed * _factor(weight, zero_centered, wide)).to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> Tensor:
    """See `mcore_kernels.protocols.LayerNormOp`."""
    wide = x.to(accumulation_dtype(x.dtype))
    centred = wide - _spread(_total(wide) / x.shape[-1], wide)
    y = _scaled(centred, eps) * _factor(weight, zero_centered, wide)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.AddRmsNormOp`."""
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered).to(x.dtype), total


def _scaled(x: Tensor, eps: float) -> Tensor:
    return x * _spread(torch.rsqrt(_total(x * x) / x.shape[-1] + eps), x)


def _factor(weight: Tensor, zero_centered: bool, like: Tensor) -> Tensor:
    weight = weight.to(like.dtype)
    return weight + 1.0 if zero_centered else weight


def _total(x: Tensor) -> Tensor:
    return _Total.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def _spread(x: Tensor, like: Tensor) -> Tensor:
    return _Spread.apply(x, like.shape[-1])  # type: ignore[no-untyped-call,no-any-return]


def _folded(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        front, back = x[..., :half], x[..., half:]
        # The middle of an odd row has no partner.
        rest = front[..., back.shape[-1] :]
        x = torch.cat([front[..., : back.shape[-1]] + back, rest], -1)
    return x


class _Total(torch.autograd.Function):
    """The sum over the last dim […, 1]; its gradient is spread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[-1]
        return _folded(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _spread(grads[0], grads[0].new_empty(ctx.size))


class _Spread(torch.autograd.Function):
    """One number per row, repeated over the row; its gradient is the sum, in the same order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        return x.expand(*x.shape[:-1], size).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _total(grads[0]), None

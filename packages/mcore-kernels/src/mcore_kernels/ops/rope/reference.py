"""Rotary position embedding in plain torch.

Shapes: T tokens, Q query heads, K kv heads, D head size, R rotary size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype, rounded


class ReferenceRope:
    """`mcore_kernels.protocols.RopeOp` in plain torch."""

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `RopeOp`; ValueError when R exceeds D or rows do not match."""
        check_rotary(q, k, cos)
        turned_q, turned_k = _Rope.apply(q, k, cos, sin, interleaved)  # type: ignore[no-untyped-call]
        return turned_q, turned_k

    def inplace(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> None:
        """See `RopeOp`."""
        check_rotary(q, k, cos)
        check_no_grad(q, k)
        for x, turned in zip((q, k), _rotate(q, k, cos, sin, interleaved), strict=True):
            x.copy_(turned)


def check_no_grad(q: Tensor, k: Tensor) -> None:
    """ValueError where autograd would have to record what happens to q or k."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        raise ValueError("rope: q and k are turned in place without autograd, under torch.no_grad")


def check_rotary(q: Tensor, k: Tensor, cos: Tensor) -> None:
    """ValueError unless cos has a row per token and R fits into the heads."""
    rotary = 2 * cos.shape[-1]
    size = min(q.shape[-1], k.shape[-1])
    if rotary > size:
        raise ValueError(
            f"rope: cos and sin of size {cos.shape[-1]} turn {rotary} elements of a head, which "
            f"has {size}; at most {size // 2}"
        )
    if not q.shape[0] == k.shape[0] == cos.shape[0]:
        raise ValueError(
            f"rope: q, k and cos need one row per token, got {q.shape[0]}, {k.shape[0]} and "
            f"{cos.shape[0]}"
        )


class _Rope(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle, so q and k are not kept."""

    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(q, k, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = _rotate(grads[0], grads[1], cos, -sin, ctx.interleaved)
        return dq, dk, None, None, None


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Turn the first R elements of each head: x · cos + (x with the pairs swapped) · (∓ sin)."""
    wide = accumulation_dtype(q.dtype)
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    if interleaved:
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D], cos and sin [T, 1, R] → [T, heads, D]."""
    rotary = cos.shape[-1]
    part = x[..., :rotary].to(cos.dtype)
    if interleaved:
        swapped = torch.stack((part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        swapped = part.roll(rotary // 2, dims=-1)
    turned = rounded(torch.addcmul(swapped.mul_(sin), part, cos), x.dtype)
    if rotary == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., rotary:]), dim=-1)

"""Rotary position embedding in plain torch.

Shapes: T tokens, heads (Q or K), D head size, R rotary size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.RopeOp`; ValueError when R exceeds D."""
    check_rotary(q, k, cos)
    return (
        _Rotate.apply(q, cos, sin, interleaved),  # type: ignore[no-untyped-call]
        _Rotate.apply(k, cos, sin, interleaved),  # type: ignore[no-untyped-call]
    )


def check_rotary(q: Tensor, k: Tensor, cos: Tensor) -> None:
    """ValueError unless cos has a row per token and R fits into the heads."""
    rotary = 2 * cos.shape[-1]
    if rotary > q.shape[-1] or rotary > k.shape[-1]:
        raise ValueError(
            f"rope: cos [T, R/2] turns R = {rotary} elements, more than the head size "
            f"{min(q.shape[-1], k.shape[-1])}"
        )
    if not q.shape[0] == k.shape[0] == cos.shape[0]:
        raise ValueError(
            f"rope: q, k and cos need one row per token, got {q.shape[0]}, {k.shape[0]} and "
            f"{cos.shape[0]}"
        )


class _Rotate(torch.autograd.Function):
    """A rotation: its gradient is the rotation by the opposite angle, and x need not be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """[T, heads, D] → [T, heads, D]: the first R elements of each head turned."""
    rotary = 2 * cos.shape[-1]
    wide = accumulation_dtype(x.dtype)
    cos, sin = cos.to(wide), sin.to(wide)
    turned = x[..., :rotary].to(wide)
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        swapped = torch.stack((odd, even), dim=-1).flatten(-2)
        cos = cos.repeat_interleave(2, dim=-1)
        sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
    else:
        swapped = turned.roll(rotary // 2, dims=-1)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    result = swapped.mul_(sin.unsqueeze(1)).addcmul_(turned, cos.unsqueeze(1)).to(x.dtype)
    if rotary == x.shape[-1]:
        return result
    return torch.cat((result, x[..., rotary:]), dim=-1)

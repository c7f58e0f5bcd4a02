"""Attention from FlashAttention-4 (`flash-attn-4`), the fastest there is on Hopper and Blackwell.

Imported only when it is chosen. Its kernels are compiled when a process first needs them, which
takes some seconds for each head size and mask. As everywhere, sums over queries in the backward
are made by atomic additions: gradients of two runs differ in the last bits.

Shapes: T tokens, B segments of S tokens, Q query heads, D head size of queries and keys, Dv of
values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flash_attn.cute import interface
from torch import Tensor

from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility
from mcore_kernels.ops.attention.flash import FlashAttention, FlashPlan, pad

FLASH = FlashAttention()

HEAD_DIMS = (64, 128)
"""Head sizes that are served. With some smaller ones the kernels leave out gradients of queries."""


class Flash4Attention(Attention):
    """`mcore_kernels.protocols.AttentionOp` on Hopper and later, for bfloat16 and float16."""

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """Every mask and cap for its head sizes; others go where `flash` sends them."""
        other = FLASH.plan(q, k, segments, visibility)
        if q.shape[-1] not in HEAD_DIMS:
            return other
        return Flash4Plan(segments=segments, visibility=visibility, other=other)


@dataclass(frozen=True, kw_only=True)
class Flash4Plan(FlashPlan):
    """As `FlashPlan`, with other kernels; `other` is for values of another head size."""

    other: Plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if v.shape[-1] != q.shape[-1]:
            return self.other.forward(q, k, v)
        return super().forward(q, k, v)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if v.shape[-1] != q.shape[-1]:
            return self.other.backward(grad_out, q, k, v, out=out, lse=lse)
        return super().backward(grad_out, q, k, v, out=out, lse=lse)

    def _as_promised(self, out: Tensor, lse: Tensor) -> Tensor:
        # A query that sees no key has -inf, which is right, and so has one whose scores are NaN:
        # its output tells. The sum is one small kernel where a choice would be several.
        return torch.add(lse, out[..., 0], alpha=0)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = interface._flash_attn_fwd(
            *(self._in_place(x) for x in (q, k, v)), return_lse=True, **self._options()
        )
        if self.segments.uniform is not None:
            return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out, lse

    def _run_backward(  # noqa: PLR0917 -- as in FlashPlan
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.segments.uniform is not None:
            lse = lse.view(lse.shape[0], *self.segments.uniform).transpose(0, 1).contiguous()
        tensors = (self._in_place(x) for x in (q, k, v, out, grad_out))
        dq, dk, dv, *_ = interface._flash_attn_bwd(*tensors, lse, **self._options())
        if self.segments.uniform is not None:
            dq, dk, dv = (grad.flatten(0, 1) for grad in (dq, dk, dv))
        return dq, dk, dv

    def _in_place(self, x: Tensor) -> Tensor:
        """[T, heads, D] as the kernels take it; with equal segments [B, S, heads, D], a view."""
        x = pad(x, x.shape[-1])
        return x if self.segments.uniform is None else x.view(*self.segments.uniform, *x.shape[1:])

    def _options(self) -> dict[str, Any]:
        seen = self.visibility
        options: dict[str, Any] = {
            "softmax_scale": seen.scale, "causal": seen.causal, "softcap": seen.softcap or 0.0,
        }  # fmt: skip
        if seen.window is not None:
            options["causal"] = False
            options["window_size_left"] = seen.window - 1
            options["window_size_right"] = 0 if seen.causal else seen.window - 1
        if self.segments.uniform is None:
            one = self.segments
            options |= {
                "cu_seqlens_q": one.cu_seqlens_q.to(torch.int32),
                "cu_seqlens_k": one.cu_seqlens_k.to(torch.int32),
                "max_seqlen_q": one.max_seqlen_q,
                "max_seqlen_k": one.max_seqlen_k,
            }
        return options


ATTENTION = Flash4Attention()
"""The operator; it holds no state."""

"""Attention from the FlashAttention-2 kernels that torch's CUDA builds bring (arXiv:2307.08691).

Called by its own name rather than through `scaled_dot_product_attention`, which takes no packed
segments and keeps the log-sum-exp to itself. One launch serves all segments, and no length is
read back from the device.

Shapes: T tokens, N segments, Q query heads, K kv heads, D head size of queries and keys, Dv of
values, P the padded head size: max(D, Dv) rounded up to a multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility
from mcore_kernels.ops.attention.flex import FLEX, has_triton
from mcore_kernels.ops.attention.reference import REFERENCE

MAX_HEAD_DIM = 256

MIN_CAPPED = 128
"""Queries of the longest segment from which on capped scores are worth a generated kernel."""


class FlashAttention(Attention):
    """`mcore_kernels.protocols.AttentionOp` on CUDA devices, for bfloat16 and float16."""

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """Capped scores, which the kernels do not know, go elsewhere."""
        if visibility.softcap is not None:
            return capped(q, k, segments, visibility)
        return FlashPlan(segments=segments, visibility=visibility)


def capped(q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
    """Who serves capped scores: `flex` where it can, and segments are long, else the reference.

    A short segment is done before a kernel for it would be generated.
    """
    if segments.max_seqlen_q < MIN_CAPPED or not q.is_cuda or not has_triton():
        return REFERENCE.plan(q, k, segments, visibility)
    return FLEX.plan(q, k, segments, visibility)


@dataclass(frozen=True, kw_only=True)
class FlashPlan(Plan):
    """The kernels' arguments besides the tensors."""

    segments: Segments
    visibility: Visibility

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if not q.numel() or not k.shape[0]:
            lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
            return q.new_zeros(*q.shape[:2], v.shape[2]), lse
        out, lse = self._run_forward(q, k, v)
        out = out[..., : v.shape[-1]]
        lse = self._as_promised(out, lse.t())
        stray = self._stray(q, self.segments.cu_seqlens_q)
        if stray is not None:
            out = out.masked_fill(stray[:, None, None], 0.0)
            lse = lse.masked_fill(stray[:, None], -torch.inf)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if not q.numel() or not k.shape[0]:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        heads_first = lse.t()
        if self.segments.uniform is None:  # else every query sees itself
            heads_first = heads_first.masked_fill(heads_first == -torch.inf, torch.inf)
        heads_first = heads_first.contiguous()
        grads = self._run_backward(grad_out, q, k, v, out, heads_first)
        dq, dk, dv = (grad[..., : x.shape[-1]] for x, grad in zip((q, k, v), grads, strict=True))
        stray_q = self._stray(q, self.segments.cu_seqlens_q)
        stray_k = self._stray(k, self.segments.cu_seqlens_k)
        if stray_q is not None and stray_k is not None:
            dq = dq.masked_fill(stray_q[:, None, None], 0.0)
            dk = dk.masked_fill(stray_k[:, None, None], 0.0)
            dv = dv.masked_fill(stray_k[:, None, None], 0.0)
        return dq, dk, dv

    def _as_promised(self, out: Tensor, lse: Tensor) -> Tensor:
        """The log-sum-exp [T, Q] of the operator from that of the kernel.

        It marks by +inf a query that sees no key, and one whose scores are NaN.
        """
        nothing = torch.where(out[..., 0].isnan(), torch.nan, -torch.inf)
        return torch.where(lse == torch.inf, nothing, lse)

    def _run_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The kernel's output [T, Q, Dv or more] and log-sum-exp [Q, T]."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *_padded(q, k, v), *self._lengths(), 0.0, self.visibility.causal, False,
            **self._keywords(),
        )  # fmt: skip
        return out, lse

    def _run_backward(  # noqa: PLR0917 -- one internal caller
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel's gradients, of head sizes D or more; lse is [Q, T], +inf for blind rows."""
        padded = _padded(q, k, v)
        size = padded[0].shape[-1]
        unused = q.new_zeros(2, dtype=torch.uint64)  # the state of a dropout that is not done
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            pad(grad_out, size), *padded, pad(out, size), lse, *self._lengths(), 0.0,
            self.visibility.causal, unused, unused, **self._keywords(),
        )  # fmt: skip
        return dq, dk, dv

    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        one = self.segments
        return one.cu_seqlens_q, one.cu_seqlens_k, one.max_seqlen_q, one.max_seqlen_k

    def _keywords(self) -> dict[str, Any]:
        keywords: dict[str, Any] = {"scale": self.visibility.scale}
        window = self.visibility.window
        if window is not None:
            keywords["window_size_left"] = window - 1
            keywords["window_size_right"] = 0 if self.visibility.causal else window - 1
        return keywords

    def _stray(self, x: Tensor, ends: Tensor) -> Tensor | None:
        """Mask [T] of the rows past the last segment, which the kernel leaves as they were."""
        if self.segments.uniform is not None:
            return None
        return torch.arange(x.shape[0], device=x.device) >= ends[-1]


def _padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with the head size P: zeros change neither a score nor a used output."""
    size = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    return pad(q, size), pad(k, size), pad(v, size)


def pad(x: Tensor, size: int) -> Tensor:
    """`x` with the head size `size`, and as the kernels read it."""
    if x.shape[-1] != size:
        return F.pad(x, (0, size - x.shape[-1]))
    return aligned(x)


def aligned(x: Tensor) -> Tensor:
    """`x` […, D] as the kernels read it, 16 bytes at a time: copied only where it lies otherwise.

    Every head has to begin at a multiple of 8 elements.
    """
    fits = not any(step % 8 for step in (x.storage_offset(), *x.stride()[:-1]))
    return x if x.stride(-1) == 1 and fits else x.clone(memory_format=torch.contiguous_format)

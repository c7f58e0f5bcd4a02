"""Attention from cuDNN, through torch.

About 1.9 times as fast as FlashAttention-2 on Hopper. cuDNN builds a plan for every new shape,
which takes a good part of a second, so it gets the segments of training: many tokens, equally
long, the same again and again. All others go to FlashAttention-2.

Shapes: T tokens, B segments of S tokens, Q query heads, K kv heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.attention.base import Attention, Plan, Segments, Visibility
from mcore_kernels.ops.attention.flash import FlashPlan, aligned, capped

MAX_HEAD_DIM = 128
MIN_LENGTH = 128


class CudnnAttention(Attention):
    """`mcore_kernels.protocols.AttentionOp` on Hopper and later, for bfloat16 and float16."""

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """Choose cuDNN for long equal segments without a window, else what `flash` does."""
        if visibility.softcap is not None:
            return capped(q, k, segments, visibility)
        flash = FlashPlan(segments=segments, visibility=visibility)
        uniform, size = segments.uniform, q.shape[-1]
        if uniform is None or uniform[1] < MIN_LENGTH or visibility.window is not None:
            return flash
        if size % 8 or size > MAX_HEAD_DIM:
            return flash
        return CudnnPlan(uniform=uniform, visibility=visibility, other=flash)


@dataclass(frozen=True, kw_only=True)
class CudnnPlan(Plan):
    """The operator's arguments besides the tensors; `other` is for values of another head size."""

    uniform: tuple[int, int]
    visibility: Visibility
    other: FlashPlan

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if v.shape[-1] != q.shape[-1] or not q.numel():
            return self.other.forward(q, k, v)
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            self._heads_first(q), self._heads_first(k), self._heads_first(v),
            None, None, None, *self._lengths(), True, 0.0, self.visibility.causal, False,
            scale=self.visibility.scale,
        )  # fmt: skip
        return self._flat(out), lse.squeeze(-1).transpose(1, 2).flatten(0, 1)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcore_kernels.ops.attention.base.Plan`."""
        if v.shape[-1] != q.shape[-1] or not q.numel():
            return self.other.backward(grad_out, q, k, v, out=out, lse=lse)
        count, length = self.uniform
        stats = lse.view(count, length, -1).transpose(1, 2).contiguous().unsqueeze(-1)
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout not done
        grads: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            self._heads_first(grad_out), self._heads_first(q), self._heads_first(k),
            self._heads_first(v), self._heads_first(out), stats, unused, unused,
            None, None, None, *self._lengths(), 0.0, self.visibility.causal,
            scale=self.visibility.scale,
        )  # fmt: skip
        dq, dk, dv = grads
        return self._flat(dq), self._flat(dk), self._flat(dv)

    def _lengths(self) -> tuple[int, int]:
        return self.uniform[1], self.uniform[1]

    def _heads_first(self, x: Tensor) -> Tensor:
        """[T, heads, D] → [B, heads, S, D], a view."""
        return aligned(x).view(*self.uniform, *x.shape[1:]).transpose(1, 2)

    def _flat(self, x: Tensor) -> Tensor:
        """[B, heads, S, D] → [T, heads, D]."""
        return x.transpose(1, 2).flatten(0, 1)

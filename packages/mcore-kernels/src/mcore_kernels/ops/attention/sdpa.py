"""Attention from torch's fused CPU kernel, the one behind `scaled_dot_product_attention`.

It is called by its own name because the public function keeps the log-sum-exp to itself, and
because its backward must also take an output merged over several blocks.

Shapes: B segments, lq and lk queries and keys of each, Q query heads, K kv heads, D head size of
queries and keys, Dv of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.ops.attention.base import Plan, Segments, Visibility
from mcore_kernels.ops.attention.packed import PackedAttention
from mcore_kernels.ops.attention.reference import REFERENCE

_VECTOR = 16
"""Over fewer keys than this the kernel's maximum passes over NaN: such a query would give 0."""


class SdpaAttention(PackedAttention):
    """One kernel call per run of equally long segments; memory grows with lq + lk.

    A mask [lq, lk] is built where the kernel knows no flag for what is visible: windows, and
    causal segments with fewer queries than keys (but not for a single query). Capped scores, which
    the kernel does not know, go to the reference.
    """

    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """See `PackedAttention`."""
        if visibility.softcap is not None:
            return REFERENCE.plan(q, k, segments, visibility)
        return super().plan(q, k, segments, visibility)

    def forward_block(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """See `PackedAttention`."""
        causal, bias = _bias(q, k, visibility)
        qh, kh, vh = _heads_first(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            qh, kh, vh, 0.0, causal, attn_mask=bias, scale=visibility.scale
        )
        out, lse = out.transpose(1, 2)[..., : v.shape[-1]], lse.transpose(1, 2)
        if k.shape[1] < _VECTOR:
            broken = q.isnan().any(-1)
            out = out.masked_fill(broken.unsqueeze(-1), torch.nan)
            lse = lse.masked_fill(broken, torch.nan)
        return out, lse

    def backward_block(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        visibility: Visibility,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PackedAttention`."""
        causal, bias = _bias(q, k, visibility)
        qh, kh, vh = _heads_first(q, k, v)
        doh, oh = (_pad(x, qh.shape[-1]).transpose(1, 2) for x in (grad_out, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            doh, qh, kh, vh, oh, lse.transpose(1, 2), 0.0, causal, attn_mask=bias,
            scale=visibility.scale,
        )  # fmt: skip
        size, value_size = q.shape[-1], v.shape[-1]
        return (
            dq.transpose(1, 2)[..., :size],
            dk.transpose(1, 2)[..., :size],
            dv.transpose(1, 2)[..., :value_size],
        )


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, l, heads, D] → [B, heads, l, D], the smaller of D and Dv filled up with zeros.

    The kernel takes one head size only; zeros change neither a score nor a used output.
    """
    size = max(q.shape[-1], v.shape[-1])
    return (
        _pad(q, size).transpose(1, 2),
        _pad(k, size).transpose(1, 2),
        _pad(v, size).transpose(1, 2),
    )


def _pad(x: Tensor, size: int) -> Tensor:
    # The kernel takes it for granted that the last dim lies in one piece; it does not check.
    x = x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _bias(q: Tensor, k: Tensor, visibility: Visibility) -> tuple[bool, Tensor | None]:
    """The kernel's causal flag, and what has to be added to the scores besides."""
    lq, lk = q.shape[1], k.shape[1]
    if visibility.causal and visibility.window is None and lq == lk:
        return True, None
    hidden = visibility.hidden(lq, lk, q.device)
    if hidden is None:
        return False, None
    return False, torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, -torch.inf)

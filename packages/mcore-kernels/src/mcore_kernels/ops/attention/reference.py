"""Attention from matrix products, in the accumulation dtype.

Shapes: B segments, lq and lk queries and keys of each, Q query heads, K kv heads, D head size of
queries and keys, Dv of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.attention.base import Visibility
from mcore_kernels.ops.attention.packed import PackedAttention
from mcore_kernels.protocols import accumulation_dtype


class ReferenceAttention(PackedAttention):
    """Memory: the scores [B, Q, lq, lk] of the segments of one length, in forward and backward."""

    def forward_block(
        self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """See `PackedAttention`."""
        groups = k.shape[2]
        scores = _scores(_heads_first(q, groups), _heads_first(k, groups), visibility)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp_() @ _heads_first(v, groups)
        return _tokens_first(out, q), lse.permute(0, 3, 1, 2).flatten(2)

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
        groups = k.shape[2]
        qh, kh, vh = (_heads_first(x, groups) for x in (q, k, v))
        dout = _heads_first(grad_out, groups)
        delta = (dout * _heads_first(out, groups)).sum(-1, keepdim=True)
        base = lse.view(*lse.shape[:2], groups, -1).permute(0, 2, 3, 1).unsqueeze(-1)
        scores = _scores(qh, kh, visibility)
        p = (scores - base).exp_()
        dv = (p.transpose(-1, -2) @ dout).sum(2, keepdim=True)
        ds = (dout @ vh.transpose(-1, -2)).sub_(delta).mul_(p).mul_(visibility.scale)
        if visibility.softcap is not None:
            slope = 1.0 - (scores / visibility.softcap).square_()
            ds = torch.where(scores == -torch.inf, 0.0, ds * slope)
        dk = (ds.transpose(-1, -2) @ qh).sum(2, keepdim=True)
        return _tokens_first(ds @ kh, q), _tokens_first(dk, k), _tokens_first(dv, v)


def _heads_first(x: Tensor, groups: int) -> Tensor:
    """[B, l, heads, D] → [B, K, heads // K, l, D] in the accumulation dtype."""
    x = x.view(*x.shape[:2], groups, -1, x.shape[3]).permute(0, 2, 3, 1, 4)
    return x.to(accumulation_dtype(x.dtype))


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_heads_first`, in the dtype of `like`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3).to(like.dtype)


def _scores(q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(visibility.scale)
    if visibility.softcap is not None:
        scores = scores.div_(visibility.softcap).tanh_().mul_(visibility.softcap)
    hidden = visibility.hidden(q.shape[-2], k.shape[-2], q.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


REFERENCE = ReferenceAttention()
"""The operator; it holds no state."""

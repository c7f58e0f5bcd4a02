"""Attention in plain torch: the default `AttentionOp`, and what faster ones are compared with.

Shapes: B segments of equal length, L tokens of one, Q query heads, K kv heads, D head size of
queries and keys, Dv of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TorchAttention", "accumulation_dtype"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _Masking(NamedTuple):
    """What one segment's scores need besides q and k."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None = None

    def hidden(self, lq: int, lk: int, device: torch.device) -> Tensor | None:
        """The mask [lq, lk] of the keys that a query may not see; None: it sees all."""
        if not self.causal and self.window is None:
            return None
        position = torch.arange(lq, device=device)[:, None] + (lk - lq)
        key = torch.arange(lk, device=device)[None, :]
        hidden = torch.zeros(lq, lk, dtype=torch.bool, device=device)
        if self.causal:
            hidden |= key > position
        if self.window is not None:
            hidden |= key <= position - self.window
            if not self.causal:
                hidden |= key >= position + self.window
        return hidden


_QKV = tuple[Tensor, Tensor, Tensor]


def _heads_first(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, L, heads, D] → [B, K, heads // K, L, D] in the accumulation dtype."""
    b, length, heads, size = x.shape
    x = x.reshape(b, length, num_kv_heads, heads // num_kv_heads, size).permute(0, 2, 3, 1, 4)
    return x.to(accumulation_dtype(x.dtype))


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_heads_first`, in the dtype of `like`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3).to(like.dtype)


def _capped(q: Tensor, k: Tensor, masking: _Masking) -> Tensor:
    """All scores, scaled and soft-capped."""
    scores = q @ k.transpose(-1, -2) * masking.scale
    cap = masking.softcap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _hide(scores: Tensor, masking: _Masking) -> Tensor:
    """The same scores, minus infinity where a query may not see a key."""
    lq, lk = scores.shape[-2:]
    hidden = masking.hidden(lq, lk, scores.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # exp(-inf - -inf) is NaN: a row that sees nothing gets the finite base 0 instead.
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()


def _forward_block(qkv: _QKV, masking: _Masking) -> tuple[Tensor, Tensor]:
    """Attention of B equally long segments: q [B, L, Q, D] → [B, L, Q, Dv], [B, L, Q]."""
    q, k, v = (_heads_first(x, qkv[1].shape[2]) for x in qkv)
    scores = _hide(_capped(q, k, masking), masking)
    lse = scores.logsumexp(-1, keepdim=True)
    out = _probabilities(scores, lse) @ v
    return _tokens_first(out, qkv[0]), _tokens_first(lse, lse).squeeze(-1)


def _backward_block(
    grad_out: Tensor, qkv: _QKV, out: Tensor, lse: Tensor, masking: _Masking
) -> _QKV:
    """Gradients of `_forward_block` from its (or a merged) output and log-sum-exp."""
    tensors = (*qkv, grad_out, out, lse.unsqueeze(-1))
    q, k, v, grad, out, lse = (_heads_first(x, qkv[1].shape[2]) for x in tensors)
    scores = _capped(q, k, masking)
    slope = None if masking.softcap is None else 1 - (scores / masking.softcap).square()
    p = _probabilities(_hide(scores, masking), lse)
    delta = (grad * out).sum(-1, keepdim=True)
    ds = p * (grad @ v.transpose(-1, -2) - delta) * masking.scale
    if slope is not None:
        ds *= slope
    dq = ds @ k
    dk = (ds.transpose(-1, -2) @ q).sum(2, keepdim=True)
    dv = (p.transpose(-1, -2) @ grad).sum(2, keepdim=True)
    return _tokens_first(dq, qkv[0]), _tokens_first(dk, qkv[1]), _tokens_first(dv, qkv[2])


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """Where the segments lie: (query start, stop, key start, stop), or (B, S) for equal ones."""

    masking: _Masking
    uniform: tuple[int, int] | None
    segments: tuple[tuple[int, int, int, int], ...] = ()


def _packing(
    qkv: _QKV,
    cu_seqlens: tuple[Tensor, Tensor],
    uniform: tuple[int, int] | None,
    masking: _Masking,
) -> _Packing:
    (rows_q, heads_q), (rows_k, heads_k) = qkv[0].shape[:2], qkv[1].shape[:2]
    if masking.window is not None and masking.window < 1:
        raise ValueError(f"attention: window is {masking.window}, must be at least 1 (or None)")
    if heads_q % heads_k:
        raise ValueError(f"attention: {heads_k} kv heads do not divide {heads_q} query heads")
    if uniform is not None:
        rows = uniform[0] * uniform[1]
        if not rows == rows_q == rows_k:
            raise ValueError(
                f"attention: uniform={uniform} means {rows} rows of queries and of keys, "
                f"got {rows_q} and {rows_k}"
            )
        return _Packing(masking=masking, uniform=uniform)
    ends_q, ends_k = cu_seqlens[0].tolist(), cu_seqlens[1].tolist()
    if len(ends_q) != len(ends_k):
        raise ValueError(
            f"attention: {len(ends_q) - 1} query segments but {len(ends_k) - 1} key segments"
        )
    if ends_q[-1] > rows_q or ends_k[-1] > rows_k:
        raise ValueError(
            f"attention: segments end at query {ends_q[-1]} and key {ends_k[-1]}, "
            f"beyond the {rows_q} and {rows_k} rows given"
        )
    segments = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True)
    return _Packing(masking=masking, uniform=None, segments=tuple(segments))


def _forward_packed(qkv: _QKV, packing: _Packing) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    if packing.uniform is not None:
        shape = packing.uniform
        q, k, v = (x.reshape(*shape, *x.shape[1:]) for x in qkv)
        out, lse = _forward_block((q, k, v), packing.masking)
        return out.flatten(0, 1), lse.flatten(0, 1)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
    for a, b, c, d in packing.segments:
        if a < b:
            segment = (q[None, a:b], k[None, c:d], v[None, c:d])
            out[None, a:b], lse[None, a:b] = _forward_block(segment, packing.masking)
    return out, lse


def _backward_packed(
    grad_out: Tensor, qkv: _QKV, out: Tensor, lse: Tensor, packing: _Packing
) -> _QKV:
    masking = packing.masking
    if packing.uniform is not None:
        shape = packing.uniform
        q, k, v, grad_out, out, lse = (
            x.reshape(*shape, *x.shape[1:]) for x in (*qkv, grad_out, out, lse)
        )
        dq, dk, dv = _backward_block(grad_out, (q, k, v), out, lse, masking)
        return dq.flatten(0, 1), dk.flatten(0, 1), dv.flatten(0, 1)
    q, k, v = qkv
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for a, b, c, d in packing.segments:
        if a < b:
            segment = (q[None, a:b], k[None, c:d], v[None, c:d])
            dq[None, a:b], dk[None, c:d], dv[None, c:d] = _backward_block(
                grad_out[None, a:b], segment, out[None, a:b], lse[None, a:b], masking
            )
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Keeps only q, k, v, out and lse: the scores are computed again in the backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, packing: _Packing
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward_packed((q, k, v), packing)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.packing = packing
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        d_sinks = None if sinks is None else sinks_grad(grads[0], out, lse, sinks)
        return (*_backward_packed(grads[0], (q, k, v), out, lse, ctx.packing), d_sinks, None)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one more key per head, without a value, of these scores."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of `sinks` [Q] for an output and log-sum-exp that they are part of."""
    share = (sinks.to(lse.dtype) - lse).exp()  # of the softmax
    return -((grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1) * share).sum(0).to(sinks.dtype)


class TorchAttention:
    """`mcore_parallel.protocols.AttentionGradOp` from matrix products.

    Computes in float32 (float64 for float64 inputs).
    Memory: one [heads, lq, lk] score matrix per segment (per batch with `uniform`).
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `mcore_parallel.protocols.AttentionOp`."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        masking = _Masking(causal, window, scale, softcap)
        packing = _packing((q, k, v), (cu_seqlens_q, cu_seqlens_k), uniform, masking)
        result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, sinks, packing)  # type: ignore[no-untyped-call]
        return result

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `mcore_parallel.protocols.AttentionGradOp`."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        masking = _Masking(causal, window, scale, softcap)
        packing = _packing((q, k, v), (cu_seqlens_q, cu_seqlens_k), uniform, masking)
        with torch.no_grad():
            return _backward_packed(grad_out, (q, k, v), out, lse, packing)

"""What the implementations of attention share: arguments, checks, autograd.

Shapes: T tokens, N segments, lq and lk queries and keys of a segment, Q query heads, K kv heads,
D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which keys a query sees, the factor on the scores, and the cap on their size."""

    causal: bool
    window: int | None
    scale: float
    softcap: float | None = None

    def blind_rows(self, lq: int, lk: int) -> int:
        """How many of the first queries see no key at all."""
        if lk == 0:
            return lq
        if self.causal:
            return min(lq, max(0, lq - lk))
        if self.window is not None:
            return min(lq, max(0, lq - lk - self.window + 1))
        return 0

    def hidden(self, lq: int, lk: int, device: torch.device) -> Tensor | None:
        """Mask [lq, lk] of the keys out of sight, aligned bottom-right; None: there are none."""
        # The last query sees every key up to the causal diagonal, so one alone needs no mask.
        if self.window is None and (not self.causal or lq == 1):
            return None
        position = torch.arange(lk - lq, lk, device=device).unsqueeze(1)
        key = torch.arange(lk, device=device)
        hidden = key > position if self.causal else torch.zeros_like(key > position)
        if self.window is not None:
            hidden |= key <= position - self.window
            if not self.causal:
                hidden |= key >= position + self.window
        return hidden


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where the segments lie, as the caller gave it (see `AttentionOp`)."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    uniform: tuple[int, int] | None


class Plan(ABC):
    """One call of attention with everything but the tensors settled."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)` with a gradient of `out`, made by `backward`."""
        out, lse = _Attention.apply(q, k, v, sinks, self)  # type: ignore[no-untyped-call]
        return out, lse

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)`."""

    @abstractmethod
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(dq, dk, dv)`; `out` and `lse` may be merged over further keys."""


class Attention(ABC):
    """`mcore_kernels.protocols.AttentionOp` from a plan of forward and backward."""

    @abstractmethod
    def plan(self, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> Plan:
        """Settle how these arguments are served."""

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
        """See `AttentionOp`; ValueError for shapes that do not fit together."""
        segments = Segments(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            uniform=uniform,
        )
        visibility = _checked(q, k, segments, causal, window, scale, softcap)
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise ValueError(
                f"attention: sinks are one per query head, [{q.shape[1]}], got {list(sinks.shape)}"
            )
        return self.plan(q, k, segments, visibility).attend(q, k, v, sinks)

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
        """See `AttentionOp`."""
        segments = Segments(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            uniform=uniform,
        )
        visibility = _checked(q, k, segments, causal, window, scale, softcap)
        plan = self.plan(q, k, segments, visibility)
        with torch.no_grad():
            return plan.backward(grad_out, q, k, v, out=out, lse=lse)


def _checked(  # noqa: PLR0917 -- the arguments of AttentionOp, as they came
    q: Tensor,
    k: Tensor,
    segments: Segments,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Visibility:
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: the number of kv heads must divide that of query heads, got {k.shape[1]} "
            f"and {q.shape[1]}"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1, got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap must be positive, got {softcap}")
    if segments.cu_seqlens_q.shape != segments.cu_seqlens_k.shape:
        raise ValueError(
            f"attention: cu_seqlens_q has {segments.cu_seqlens_q.shape[0] - 1} segments, "
            f"cu_seqlens_k has {segments.cu_seqlens_k.shape[0] - 1}"
        )
    if segments.uniform is not None:
        count, length = segments.uniform
        if not count * length == q.shape[0] == k.shape[0]:
            raise ValueError(
                f"attention: uniform={segments.uniform} means {count * length} rows, got "
                f"{q.shape[0]} of q and {k.shape[0]} of k"
            )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return Visibility(causal=causal, window=window, scale=factor, softcap=softcap)


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` [T, Q, Dv] and [T, Q] with a sink's score beside those of the keys.

    Attention with sinks is attention without, followed by this: the sink has no value, so that it
    only takes its part of the softmax. A caller that merges blocks of keys does it once, behind
    the last. sinks [Q].
    """
    merged = torch.logaddexp(lse, sinks.to(lse.dtype))
    share = (lse - merged).exp().unsqueeze(-1)
    return (out * share).to(out.dtype), merged


def sinks_grad(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks [Q], given the merged `out` and `lse`, in the sinks' dtype."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum(0).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, out and lse; the scores are computed again in the backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 -- autograd passes by position
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        out, lse = plan.forward(q, k, v)
        if sinks is not None:
            out, lse = merge_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan = plan
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dsinks = None if sinks is None else sinks_grad(grads[0], out, lse, sinks)
        return (*ctx.plan.backward(grads[0], q, k, v, out=out, lse=lse), dsinks, None)

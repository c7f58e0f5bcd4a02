"""Attention over packed segments; `TorchAttention` is the plain one.

T tokens, N segments, Q query heads, K kv heads, D head size of queries and keys, Dv of values.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["AttentionGradOp", "AttentionOp"]


class AttentionOp(Protocol):
    """Softmax attention over segments packed one after another (variable length)."""

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
        """Return `(out [Tq, Q, Dv], lse [Tq, Q])`; the gradient flows through `out` only.

        q [Tq, Q, D], k [Tk, K, D], v [Tk, K, Dv]; K divides Q, and query head h reads kv head
        h // (Q // K). `cu_seqlens_*` int32 [N+1]: segment n holds rows cu[n] … cu[n+1]-1; segments
        may be empty; rows past the last belong to none and give zeros. Nothing crosses a segment.
        `uniform=(B, S)` promises that there are B segments of S queries and S keys each, so that
        no value need be read back from the device.

        A query i of a segment with lq queries and lk keys stands at key position
        p = i + lk - lq (bottom-right alignment). `causal` shows it the keys j ≤ p; `window=w`
        shows it the keys j > p - w, and without `causal` also only those j < p + w: w keys,
        itself included, in the causal case. `scale` defaults to D^-½. `softcap` c makes a scaled
        score s into c · tanh(s / c). `sinks` [Q] are scores of one more key per head, without a
        value, that every query sees: they take their part of the softmax and get a gradient.

        lse is the natural log of the sum of exp of the scaled, visible scores (the sink among
        them), at least float32. A query that sees no key has out 0, lse -inf (or the sink's score)
        and no gradient.
        """


class AttentionGradOp(AttentionOp, Protocol):
    """An `AttentionOp` whose backward can be called by itself, as ring attention needs."""

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
        """Return `(dq, dk, dv)`, shaped and typed as q, k, v.

        `out` and `lse` may come from more keys than k holds (they were merged over several
        blocks, or with a sink); the result is then this block's share, and the shares add up.
        """

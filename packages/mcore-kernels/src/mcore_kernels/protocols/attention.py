"""Attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
        them), in the accumulation dtype (to four digits for 16-bit inputs); every implementation
        returns it.
        A query that sees no key has out 0, lse -inf (or the sink's score) and no gradient.
        """

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
        """Return `(dq, dk, dv)`, shaped and typed as q, k, v; ring attention calls this itself.

        `out` and `lse` may come from more keys than k holds (merged over several blocks, or with a
        sink): the result is then this block's share, and the shares add up.
        """


class PagedAttentionOp(Protocol):
    """Attention of serving: new tokens over keys and values that lie in pages."""

    def __call__(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        block_table: Tensor,
        context_lengths: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `(out [T, Q, Dv], lse [T, Q])`; no gradient is recorded.

        q [T, Q, D] are the new tokens of N sequences one after another, bounds `cu_seqlens_q`
        [N+1]: one each when decoding, several in chunks of prompts, and both kinds together; rows
        past the last give zeros. Their keys and values are in the cache already.

        Key j of sequence n is row j % P of page `block_table[n, j // P]`: key_cache [pages, P, K,
        D], value_cache [pages, P, K, Dv], block_table int32 [N, most pages of a sequence]. The
        last dim lies in one piece; the others may have any strides. `context_lengths` int32 [N]
        counts the keys, new ones included; entries of the table past them are never read. A cache
        of another dtype (float8_e4m3fn) holds keys / key_scale and values / value_scale, factors
        [K] in float32.

        Always causal, aligned bottom-right; `window`, `scale`, `softcap`, `sinks` and the results
        as in `AttentionOp`.
        """

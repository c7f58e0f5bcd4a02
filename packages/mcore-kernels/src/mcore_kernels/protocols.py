"""What each operator owes its callers, whichever implementation stands behind it.

Shapes: T tokens, H hidden, F feed-forward, I/O input and output features, N segments, Q query
heads, K kv heads, D head size of queries and keys, Dv of values, R rotary size, V columns of a
vocabulary shard; C channels, W taps of a convolution, h heads of size P with a state of size S, G
groups of heads. "…" is any leading shape. Every size but H, D, R, W, G and h may be 0.

Dtypes: the accumulation dtype is float32, or float64 when the input is float64. Operators
compute in it and round once, at the end, to the dtype of their first argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operator computes: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype: itself, untouched, when it has that dtype already.

    What the forward of an autograd function returns must be a fresh result. When it is the very
    tensor that an in-place operator, or a `to` with nothing to do, handed back, torch.compile of
    torch 2.11 loses the gradient without a word.
    """
    return x if x.dtype == dtype else x.to(dtype)


class LinearOp(Protocol):
    """A matrix product `y = x Wᵀ (+ b)` whose three products can also be called one by one."""

    amax_reduce: Callable[[Tensor], Tensor] | None
    """Hook for implementations with scales: local absolute maxima → the maxima over all ranks
    that share a scale. None: scales are local. Implementations without scales never call it."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x weightᵀ + bias`: x [T, I], weight [O, I], bias [O] → [T, O]; differentiable."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x weightᵀ` [T, O], a fresh tensor; records no autograd."""

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return `dy weight`: dy [T, O], weight [O, I] → [T, I], a fresh tensor."""

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `dyᵀ x`: dy [T, O], x [T, I] → [O, I].

        With `out` (any float dtype; usually a float32 gradient buffer) the product is added to it
        at the precision of `out`, and `out` is returned.
        """


class RmsNormOp(Protocol):
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) · weight` over the last dim: x […, H], weight [H].

        The product with the weight is taken before rounding. The gradient of the weight has the
        weight's dtype, summed in the accumulation dtype.
        """


class LayerNormOp(Protocol):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) · weight + bias`: x […, H], weight and bias [H].

        `var` is the biased variance. One rounding, after the bias.
        """


class SwigluOp(Protocol):
    """The gated activation of Shazeer 2020 (arXiv:2002.05202)."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) · up`: gate_up […, 2F], the gate in the first half → […, F]."""


class GeluOp(Protocol):
    """Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

    def __call__(self, x: Tensor, approximate: str = "none") -> Tensor:
        """Return `x Φ(x)`, shaped as x; `approximate="tanh"` uses the tanh formula of the paper."""


class RopeOp(Protocol):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys."""

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return rotated `(q, k)`: q [T, Q, D], k [T, K, D], cos and sin [T, R/2], R ≤ D.

        Pair i of the first R elements of a head turns by the angle i of its token; the other
        D - R elements are passed on. Pair i is (i, i + R/2), or (2i, 2i + 1) when `interleaved`.
        No gradient flows to cos and sin.
        """


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
        itself included, in the causal case. `scale` defaults to D^-½.

        lse is the natural log of the sum of exp of the scaled, visible scores, in the
        accumulation dtype (to four digits for 16-bit inputs); every implementation returns it.
        A query that sees no key has out 0, lse -inf and no gradient.
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(dq, dk, dv)`, shaped and typed as q, k, v; ring attention calls this itself.

        `out` and `lse` may come from more keys than k holds (merged over several blocks): the
        result is then this block's share, and the shares add up.
        """


class VocabLossOp(Protocol):
    """The local arithmetic of a softmax loss over a vocabulary that is cut over ranks.

    The caller reduces over ranks between the methods: `local_max` (max), `partials` (sum). With z
    the logits, m their global maximum, s the global sum of exp(z - m) and class weights that add
    up to 1 (`on_target` on the label's class plus `on_all` on every class):

        loss = log s - on_target · (z_label - m) - on_all · Σ_j (z_j - m)

    Shards hold real columns only; their row stride may exceed V (a slice of a padded shard), and
    V may be 0. `labels` int64 [T] count the columns of this shard; a value outside [0, V) means
    that the label's column is on another shard.
    """

    def local_max(self, logits: Tensor) -> Tensor:
        """The largest logit of each row [T], in the accumulation dtype; -inf when V is 0."""

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """This shard's share [3, T] of (s, z_label - m, Σ_j (z_j - m)), accumulation dtype.

        The second row is 0 where the label is elsewhere; the third is 0 without `smoothing`.
        """

    def backward(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        grad: Tensor,
        *,
        on_target: float,
        on_all: float,
        out: Tensor,
    ) -> None:
        """Write grad · (exp(z - m)/s - on_target · [j is the label] - on_all) into out [T, V].

        `maximum` and `sum_exp` [T] are global, `grad` [T] is the gradient of the loss. `out` may
        have a row stride above V and another dtype, and may be `logits` itself.
        """


class CausalConv1dOp(Protocol):
    """A short convolution over each channel's own past, inside packed documents."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        cu_seqlens: Tensor,
        uniform: tuple[int, int] | None = None,
        initial_states: Tensor | None = None,
        silu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return `(y [T, C], states [N, W-1, C])`: x [T, C], weight [C, W], bias [C].

            y[t] = f(bias + Σ_k weight[:, k] · x[t - (W-1) + k]),  f = silu or nothing

        `cu_seqlens` [N+1] bounds the documents as in attention: they may be empty, and rows past
        the last belong to none and give zeros. What lies before a document is its row of
        `initial_states` [N, W-1, C], oldest first, or zeros; nothing crosses a document's bounds.
        `states` are the last W-1 inputs of each document, what came before it included: the
        initial states of its continuation. They have the dtype of x. Differentiable in x, weight,
        bias and the initial states, through both results.

        `uniform=(N, S)` promises documents of S rows each, without any other row.
        """


class SsdScanOp(Protocol):
    """The selective state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), over documents."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a_log: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        uniform: tuple[int, int] | None = None,
        d: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        initial_states: Tensor | None = None,
        chunk_size: int = 256,
    ) -> tuple[Tensor, Tensor]:
        """Return `(y [T, h, P], states [N, h, P, S])`.

        x [T, h, P], dt [T, h], a_log [h], b and c [T, G, S], d and dt_bias [h]; G divides h, and
        head i reads group i // (h // G) of b and c. In each document, for each head, from its
        row of `initial_states` [N, h, P, S] (or zeros) on:

            Δ[t] = clamp(softplus(dt[t] + dt_bias), dt_limits)
            H[t] = exp(-exp(a_log) · Δ[t]) · H[t-1] + Δ[t] · x[t] ⊗ b[t]
            y[t] = H[t] c[t] + d · x[t]

        `states` are the last H of each document (its initial one where it is empty), in the
        accumulation dtype: the initial states of its continuation. Nothing crosses the bounds of a
        document, `cu_seqlens` [N+1], of which `max_seqlen` is the longest; rows past the last
        document give zeros. `uniform=(N, S)` promises documents of S rows each, without any other
        row. Differentiable in everything that is floating, through both results.

        `chunk_size` is how many tokens an implementation in chunks takes at a time; it changes
        rounding, time and memory, never the result.
        """

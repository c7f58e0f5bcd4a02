"""Operators of state-space layers."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor


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


class GatedDeltaRuleOp(Protocol):
    """Linear attention that corrects what it remembers (Yang et al. 2024, arXiv:2412.06464)."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        uniform: tuple[int, int] | None = None,
        scale: float | None = None,
        initial_states: Tensor | None = None,
        chunk_size: int = 64,
    ) -> tuple[Tensor, Tensor]:
        """Return `(y [T, h, Dv], states [N, h, D, Dv])`.

        q and k [T, K, D], v [T, h, Dv], g and beta [T, h]; K divides h, and head i reads key head
        i // (h // K). In each document, for each head, from its row of `initial_states`
        [N, h, D, Dv] (or zeros) on:

            R[t] = exp(g[t]) · S[t-1]
            S[t] = R[t] + k[t] ⊗ β[t] · (v[t] - R[t]ᵀ k[t])
            y[t] = scale · S[t]ᵀ q[t]

        g, the logarithm of the decay, is at most 0; keys of length 1 with β between 0 and 1 keep
        the states bounded. `scale` is by default 1 / sqrt(D). `states` are the last S of each
        document (its initial one where it is empty), in the accumulation dtype: the initial states
        of its continuation. Nothing crosses the bounds of a document, `cu_seqlens` [N+1], of which
        `max_seqlen` is the longest; rows past the last document give zeros. `uniform=(N, S)`
        promises documents of S rows each, without any other row. Differentiable in everything that
        is floating, through both results.

        `chunk_size` is how many tokens an implementation in chunks takes at a time; it changes
        rounding, time and memory, never the result.
        """

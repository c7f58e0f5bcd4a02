"""Operators of dense layers: products, norms, activations, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class LinearOp(Protocol):
    """A matrix product `y = x Wᵀ (+ b)` whose three products can also be called one by one.

    An implementation may have a method `write_weight_grad(dy, x, out)` as well: what `weight_grad`
    would add to `out` is written over what is there, NaN included.
    """

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

    def __call__(
        self, x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) · weight` over the last dim: x […, H], weight [H].

        The product with the weight is taken before rounding; `zero_centered` multiplies by
        1 + weight (so that weight decay pulls towards 1), and None by nothing. The gradient of
        the weight has the weight's dtype, summed in the accumulation dtype.
        """


class LayerNormOp(Protocol):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450)."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        zero_centered: bool = False,
    ) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps) · weight + bias`: x […, H], weight and bias [H].

        `var` is the biased variance; `zero_centered` multiplies by 1 + weight. One rounding,
        after the bias.
        """


class L2NormOp(Protocol):
    """Vectors scaled to length one, such as queries and keys of a delta rule."""

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """Return `x / sqrt(Σ x² + eps)` over the last dim: x […, D]."""


class AddRmsNormOp(Protocol):
    """The residual sum of a block and the RMS norm that follows it, in one pass."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        zero_centered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return `(rms_norm(total), total)` with `total = x + residual`, all […, H].

        `total` is rounded to the wider dtype of the two (the residual stream may be float32) and
        the norm, in the dtype of x, is taken of the rounded sum: as two operators would.
        """


class SwigluOp(Protocol):
    """The gated activation of Shazeer 2020 (arXiv:2002.05202)."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) · up`: gate_up […, 2F], the gate in the first half → […, F]."""


class GluOp(Protocol):
    """Gated activations (Shazeer 2020, arXiv:2002.05202) in all their variants."""

    def __call__(
        self,
        gate_up: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str = "silu",
        limit: float | None = None,
        offset: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return `f(gate) · (up + offset) · weights`: gate_up […, 2F], gate first → […, F].

        `bias` [2F] is added to gate_up. `limit` L then clamps gate to at most L and up to
        [-L, L], as gpt-oss does. `activation` f is a name of `ActivationOp`. `weights` […], one
        number per row such as a router's, multiply before the rounding. Differentiable in all
        tensors; only they are kept for the backward.
        """


class ActivationOp(Protocol):
    """Activations of feed-forward layers without a gate."""

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str = "gelu",
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return `f(x + bias) · weights`, shaped as x […, F]: bias [F], weights […].

        `activation` f is "silu" x σ(x), "gelu" x Φ(x), "gelu_tanh" its tanh formula, "quick_gelu"
        x σ(1.702 x), "relu", "squared_relu" max(x, 0)², or "sigmoid". Differentiable in all
        tensors; only they are kept for the backward.
        """


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

    def inplace(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
    ) -> None:
        """Turn q and k where they lie (views of one tensor, for example); records no autograd.

        Raises:
            ValueError: q or k asks for a gradient.
        """

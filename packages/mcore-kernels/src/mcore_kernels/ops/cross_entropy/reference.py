"""Partial results of the softmax loss in plain torch.

Shapes: T tokens, V columns of this shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


class ReferenceVocabLoss:
    """`mcore_kernels.protocols.VocabLossOp` in plain torch."""

    def local_max(self, logits: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        wide = accumulation_dtype(logits.dtype)
        if logits.shape[1] == 0:
            return logits.new_full((logits.shape[0],), -torch.inf, dtype=wide)
        return logits.amax(-1).to(wide)

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """See `VocabLossOp`."""
        result = maximum.new_zeros(3, logits.shape[0])
        if logits.shape[1] == 0:
            return result
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        column, here = local_columns(labels, logits.shape[1])
        # Chosen, not multiplied by zero: a logit of -inf must not become NaN.
        result[1] = torch.where(here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), 0.0)
        if smoothing:
            result[2] = shifted.sum(-1)
        result[0] = shifted.exp_().sum(-1)
        return result

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
        """See `VocabLossOp`."""
        self.gradient(
            logits, labels, maximum, sum_exp, on_softmax=grad, on_surprise=None,
            on_target=on_target * grad, on_all=on_all * grad if on_all else None, out=out,
        )  # fmt: skip

    def moments(self, logits: Tensor, maximum: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        return moments(logits.to(maximum.dtype) - maximum.unsqueeze(1))

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        *,
        on_softmax: Tensor,
        on_surprise: Tensor | None,
        on_target: Tensor,
        on_all: Tensor | None,
        out: Tensor,
    ) -> None:
        """See `VocabLossOp`."""
        if logits.shape[1] == 0:
            return
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        column, here = local_columns(labels, logits.shape[1])
        coefficients = (on_softmax / sum_exp, on_surprise, on_target, on_all)
        out.copy_(gradient_of(shifted, column, here, coefficients, sum_exp))


def moments(shifted: Tensor) -> Tensor:
    """Σ_j exp(x_j) · x_j [T] of shifted logits [T, V]."""
    # A logit of -inf has probability 0, and 0 · -inf would be NaN.
    return (shifted.exp() * shifted.masked_fill(shifted == -torch.inf, 0.0)).sum(-1)


def gradient_of(
    shifted: Tensor,
    column: Tensor,
    here: Tensor,
    coefficients: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    sum_exp: Tensor,
) -> Tensor:
    """`VocabLossOp.gradient` of shifted logits [T, V], which are overwritten.

    The first of the coefficients comes divided by `sum_exp`.
    """
    on_softmax, on_surprise, on_target, on_all = coefficients
    factor = on_softmax.unsqueeze(1)
    if on_surprise is not None:
        seen = shifted.masked_fill(shifted == -torch.inf, 0.0)
        factor = factor + seen.mul_((on_surprise / sum_exp).unsqueeze(1))
    result = shifted.exp_().mul_(factor)
    at_label = torch.where(here, -on_target.to(result.dtype), 0.0)
    result.scatter_add_(1, column.unsqueeze(1), at_label.unsqueeze(1))
    return result if on_all is None else result.sub_(on_all.unsqueeze(1))


def local_columns(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Labels clamped into the shard, and which of them truly lie in it."""
    return labels.clamp(0, count - 1), (labels >= 0) & (labels < count)

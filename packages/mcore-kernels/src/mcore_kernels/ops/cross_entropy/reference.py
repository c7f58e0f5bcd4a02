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
        if logits.shape[1] == 0:
            return
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        softmax = shifted.exp_().div_(sum_exp.unsqueeze(1))
        column, here = local_columns(labels, logits.shape[1])
        at_label = here.to(softmax.dtype).mul_(-on_target)
        softmax.scatter_add_(1, column.unsqueeze(1), at_label.unsqueeze(1))
        if on_all:
            softmax.sub_(on_all)
        out.copy_(softmax.mul_(grad.unsqueeze(1)))


def local_columns(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Labels clamped into the shard, and which of them truly lie in it."""
    return labels.clamp(0, count - 1), (labels >= 0) & (labels < count)

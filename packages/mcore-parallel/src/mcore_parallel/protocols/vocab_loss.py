"""The loss over a vocabulary that is cut over ranks.

T tokens, V columns of a vocabulary shard. "Accumulation dtype" means float32, or float64 when the
input is float64.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mcore_parallel.torch_attention import accumulation_dtype

__all__ = ["TorchVocabLoss", "VocabLossOp"]


class VocabLossOp(Protocol):
    """The local arithmetic of a softmax loss over a vocabulary that is cut over ranks.

    The caller reduces over the ranks between the methods: maximum (max), then the partials (sum).
    With z the logits, m their global maximum, s the global sum of exp(z - m), and a weight per
    class that adds up to 1 (`on_target` on the label's class plus `on_all` on every class):

        loss = log s - on_target · (z_label - m) - on_all · Σ_j (z_j - m)

    All shards hold real columns only; their row stride may exceed V (a slice of a padded shard),
    and V may be 0. `labels` int64 [T] count columns of this shard; a value outside [0, V) means
    that the label's column is not here.
    """

    def local_max(self, logits: Tensor) -> Tensor:
        """The largest logit of each row [T] in the accumulation dtype; -inf when V is 0."""

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """This shard's share [3, T] of (s, z_label - m, Σ_j (z_j - m)), accumulation dtype.

        The second row is 0 where the label is not here. The third is 0 without `smoothing`.
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
        """Write grad · (exp(z - m)/s - on_target · [j is the label] - on_all) into `out` [T, V].

        `maximum` and `sum_exp` [T] are global, `grad` [T] is the loss's gradient. `out` may have
        a row stride above V and another dtype, and may be `logits` itself.
        """

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
        """Write p · (on_softmax + on_surprise · (z - m)) - on_target · [j is the label] - on_all.

        p = exp(z - m)/s. The coefficients [T] are per token; None means 0. Gradients of losses to
        which functions of log s or of the entropy are added have this form. Other arguments as in
        `backward`.
        """


class TorchVocabLoss:
    """`VocabLossOp` in plain torch."""

    def local_max(self, logits: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        dtype = accumulation_dtype(logits.dtype)
        if logits.shape[1] == 0:
            return logits.new_full((logits.shape[0],), -torch.inf, dtype=dtype)
        return logits.amax(-1).to(dtype)

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """See `VocabLossOp`."""
        result = maximum.new_zeros(3, logits.shape[0])
        if logits.shape[1] == 0:
            return result
        shifted = logits.to(maximum.dtype) - maximum.unsqueeze(1)
        column, here = _local_labels(labels, logits.shape[1])
        # where, not a product: a masked-out logit of -inf must not turn into NaN.
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
        p = (logits.to(maximum.dtype) - maximum.unsqueeze(1)).exp_().div_(sum_exp.unsqueeze(1))
        column, here = _local_labels(labels, logits.shape[1])
        p.scatter_add_(1, column.unsqueeze(1), here.to(p.dtype).mul_(-on_target).unsqueeze(1))
        if on_all:
            p.sub_(on_all)
        out.copy_(p.mul_(grad.unsqueeze(1)))

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
        factor = on_softmax.unsqueeze(1)
        if on_surprise is not None:
            # A logit of -inf has p = 0, and 0 · -inf would be NaN.
            surprise = shifted.masked_fill(shifted == -torch.inf, 0.0)
            factor = factor + on_surprise.unsqueeze(1) * surprise
        result = shifted.exp_().div_(sum_exp.unsqueeze(1)).mul_(factor)
        column, here = _local_labels(labels, logits.shape[1])
        at_label = torch.where(here, -on_target, 0.0)
        result.scatter_add_(1, column.unsqueeze(1), at_label.unsqueeze(1))
        if on_all is not None:
            result.sub_(on_all.unsqueeze(1))
        out.copy_(result)


def _local_labels(labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Labels clamped into the shard, and whether each one really lies there."""
    return labels.clamp(0, columns - 1), (labels >= 0) & (labels < columns)

"""The loss over a vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class VocabLossOp(Protocol):
    """The local arithmetic of a softmax loss over a vocabulary that is cut over ranks.

    The caller reduces over ranks between the methods: `local_max` (max), `partials` (sum). With z
    the logits, m their global maximum, s the global sum of exp(z - m) and class weights that add
    up to 1 (`on_target` on the label's class plus `on_all` on every class):

        loss = log s - on_target · (z_label - m) - on_all · Σ_j (z_j - m)

    Shards hold real columns only; their row stride may exceed V (a slice of a padded shard), and
    V may be 0. `labels` int64 [T] count the columns of this shard; a value outside [0, V) means
    that the label's column is on another shard.

    An implementation may have a method `statistics(logits, labels)` as well: the local maximum, and
    `partials` (without smoothing) with this one in place of the global one, from a single read.
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

    def moments(self, logits: Tensor, maximum: Tensor) -> Tensor:
        """This shard's share [T] of Σ_j exp(z_j - m) · (z_j - m), accumulation dtype; an entropy
        is log s less the sum of these over s. A logit of -inf adds 0."""

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

        p = exp(z - m)/s; the coefficients [T] are per token, None means 0. Log-probabilities,
        smoothed and z-losses and entropies have gradients of this form. Arguments as `backward`.
        """

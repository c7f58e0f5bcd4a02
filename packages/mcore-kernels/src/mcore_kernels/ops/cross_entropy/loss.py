"""Loss, log-probability and entropy over shards of a vocabulary, with all that losses come with.

What is local is a `VocabLossOp`; sums over shards are the caller's, given as two functions.
Shapes: T tokens, V columns of this shard, K classes in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols import VocabLossOp

Reduce = Callable[[Tensor], Tensor]


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which columns of the vocabulary are here, and how to reduce over the others.

    Attributes:
        vocab_size: K, classes of the whole vocabulary; padding is no class and is not passed in.
        first: the class of this shard's first column.
        reduce_max, reduce_sum: elementwise over all shards, equal on all of them afterwards, and
            not in place; the identity where the vocabulary is whole.
    """

    vocab_size: int
    first: int = 0
    reduce_max: Reduce = _alone
    reduce_sum: Reduce = _alone


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What a token's loss consists of.

    Attributes:
        label_smoothing: α of the label's weight is spread over the other K - 1 classes.
        z_loss: λ adds λ · lse², which keeps the logarithm of the softmax's denominator small.
        ignore_index: tokens with this label have loss, log-probability, entropy and gradient 0.

    Raises:
        ValueError: α outside [0, 1), or λ negative or not finite.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"loss: label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"loss: z_loss must be finite and not negative, got {self.z_loss}")

    def on_all(self, vocab_size: int) -> float:
        """The weight on every class; ValueError for smoothing over a single one."""
        if self.label_smoothing and vocab_size < 2:
            raise ValueError(f"loss: label_smoothing needs 2 classes, there are {vocab_size}")
        return self.label_smoothing / (vocab_size - 1) if self.label_smoothing else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabLoss:
    """Per token [T], in the accumulation dtype: loss (weighted), log p(label), entropy or None."""

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor | None


def vocab_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    op: VocabLossOp,
    shard: VocabShard,
    terms: LossTerms | None = None,
    weights: Tensor | None = None,
    entropy: bool = False,
) -> VocabLoss:
    """Return loss, log-probability and (with `entropy`) entropy of each token, differentiable.

        loss = weight · (lse - Σ_j q_j z_j + λ lse²),  q = 1 - α at the label, α / (K - 1) elsewhere

    Args:
        logits: [T, V], this shard's real columns; the row stride may exceed V.
        labels: int64 [T], classes of the whole vocabulary, the same on all shards.
        op: the local arithmetic, such as `Kernels.cross_entropy`.
        shard: where the columns lie, and the reductions over shards: one maximum and one sum.
        terms: default: plain cross-entropy.
        weights: [T] multiply the loss (not the log-probability); they get no gradient.
        entropy: also -Σ_j p_j log p_j, for one more read of the logits.

    The gradient takes that of the results to be the same on all shards. Where a label is neither a
    class nor `ignore_index`, results and gradients are NaN.
    """
    call = LossCall(
        op=op, shard=shard, terms=terms or LossTerms(), on_all=0.0, entropy=entropy
    ).checked()
    loss, log_prob, found = _VocabLoss.apply(logits, labels, weights, call)  # type: ignore[no-untyped-call]
    return VocabLoss(loss=loss, log_prob=log_prob, entropy=found if entropy else None)


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """The arguments of one call besides the tensors, and its arithmetic per token."""

    op: VocabLossOp
    shard: VocabShard
    terms: LossTerms
    on_all: float
    entropy: bool

    def checked(self) -> LossCall:
        """With the weight on every class filled in."""
        on_all = self.terms.on_all(self.shard.vocab_size)
        return LossCall(
            op=self.op, shard=self.shard, terms=self.terms, on_all=on_all, entropy=self.entropy
        )

    def forward(self, logits: Tensor, labels: Tensor) -> TokenStats:
        """One maximum and one sum over the shards."""
        shard = self.shard
        local = labels - shard.first
        maximum, sums = self._statistics(logits, local)
        if self.entropy:
            sums = torch.cat((sums, self.op.moments(logits, maximum).unsqueeze(0)))
        sums = shard.reduce_sum(sums)
        valid = labels != self.terms.ignore_index
        # Without a target term a loss would look like any other, and would be learnt from.
        stray = valid & ((labels < 0) | (labels >= shard.vocab_size))
        marks = torch.where(stray, torch.nan, 0.0)
        return TokenStats(maximum=maximum + marks, sums=sums + marks, valid=valid, local=local)

    def _statistics(self, logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        """The maximum over the shards, and this one's sums with it."""
        one_pass = getattr(self.op, "statistics", None)
        if one_pass is None or self.on_all:
            maximum = self.shard.reduce_max(self.op.local_max(logits))
            return maximum, self.op.partials(logits, local, maximum, smoothing=self.on_all > 0.0)
        own, sums = one_pass(logits, local)
        maximum = self.shard.reduce_max(own)
        if maximum is own:
            return own, sums
        lower = own - maximum
        sums[0] *= lower.exp()
        sums[1] += torch.where((local >= 0) & (local < logits.shape[1]), lower, 0.0)
        return maximum, sums

    def results(self, stats: TokenStats, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, log_prob, entropy), 0 where ignored; entropy is empty when not asked for."""
        log_sum, target = stats.log_sum, stats.sums[1]
        on_target = 1.0 - self.terms.label_smoothing - self.on_all
        loss = log_sum - on_target * target
        if self.on_all:
            loss = loss - self.on_all * stats.sums[2]
        if self.terms.z_loss:
            loss = loss + self.terms.z_loss * (log_sum + stats.maximum).square()
        if weights is not None:
            loss = loss * weights
        entropy = stats.entropy if self.entropy else loss.new_empty(0)
        found = (loss, target - log_sum, entropy)
        return tuple(  # type: ignore[return-value]
            torch.where(stats.valid, one, 0.0) if one.numel() else one for one in found
        )

    def write_gradient(
        self,
        logits: Tensor,
        stats: TokenStats,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        out: Tensor,
    ) -> None:
        """The logits' gradient into `out`, for gradients of the (weighted) loss and the others."""
        loss, log_prob, entropy = (
            None if one is None else torch.where(stats.valid, one.to(stats.maximum.dtype), 0.0)
            for one in grads
        )
        on_softmax = on_target = torch.zeros_like(stats.maximum)
        on_all = on_surprise = None
        if loss is not None:
            on_softmax, on_target = loss, loss * (1.0 - self.terms.label_smoothing - self.on_all)
            if self.terms.z_loss:
                on_softmax = loss * (
                    1.0 + 2.0 * self.terms.z_loss * (stats.log_sum + stats.maximum)
                )
            on_all = loss * self.on_all if self.on_all else None
        if log_prob is not None:
            on_softmax, on_target = on_softmax - log_prob, on_target - log_prob
        if entropy is not None:
            on_softmax = on_softmax + entropy * (stats.log_sum - stats.entropy)
            on_surprise = -entropy
        self.op.gradient(
            logits, stats.local, stats.maximum, stats.sums[0], on_softmax=on_softmax,
            on_surprise=on_surprise, on_target=on_target, on_all=on_all, out=out,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStats:
    """What the backward needs per token: global maximum and sums, validity, local labels."""

    maximum: Tensor
    sums: Tensor
    valid: Tensor
    local: Tensor

    @property
    def log_sum(self) -> Tensor:
        """log Σ_j exp(z_j - m)."""
        return self.sums[0].log()

    @property
    def entropy(self) -> Tensor:
        """-Σ_j p_j log p_j."""
        return self.log_sum - self.sums[3] / self.sums[0]


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor | None, call: LossCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = call.forward(logits, labels)
        ctx.save_for_backward(logits, weights, stats.maximum, stats.sums, stats.valid, stats.local)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.results(stats, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, weights, maximum, sums, valid, local = ctx.saved_tensors
        stats = TokenStats(maximum=maximum, sums=sums, valid=valid, local=local)
        loss, log_prob, entropy = grads
        if loss is not None and weights is not None:
            loss = loss * weights
        out = torch.empty_like(logits)
        wanted = entropy if ctx.call.entropy else None
        ctx.call.write_gradient(logits, stats, (loss, log_prob, wanted), out)
        return out, None, None, None

"""Cross-entropy and log-probability over a vocabulary that is cut over a tensor-parallel group.

T tokens, V vocabulary, K = V classes. Only per-token numbers are communicated, never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mcore_parallel.collectives import all_reduce
from mcore_parallel.group import Group
from mcore_parallel.protocols import TorchVocabLoss, VocabLossOp
from mcore_parallel.tensor.partition import VocabShard

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_log_prob"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: Group | None = None,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    op: VocabLossOp | None = None,
) -> Tensor:
    """Return the cross-entropy of each token [T] in float32, the same on every rank.

    logits [T, columns]: my columns of the vocabulary, cut evenly over `group`; columns at and past
    `vocab_size` are padding, which is left out of the softmax and gets gradient 0.
    labels int64 [T]: the same on every rank. A label outside [0, vocab_size) has no target term:
    its loss is finite and means nothing, and the caller masks it out.

    `label_smoothing` α gives the label 1 - α and spreads α over the other K - 1 classes. (torch
    spreads it over all K; its α is ours times K / (K - 1).)

    `z_loss` λ adds λ · (log Σ_j exp z_j)² (Chowdhery et al. 2022, arXiv:2204.02311), which keeps
    logits from drifting.

    The gradient of the logits takes that of the loss to be the same on every rank, as it is when
    all ranks go on with the same arithmetic. Sums over `group`: one maximum and one sum of [3, T]
    in the forward, none in the backward.

    Raises:
        ValueError: α is outside [0, 1), smoothing over a vocabulary of 1, λ is negative, or too few
            columns.
    """
    group = group or Group.single()
    shard = VocabShard.of_logits(vocab_size, logits.shape[-1], group)
    on_all = 0.0
    if label_smoothing:
        if not 0.0 < label_smoothing < 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}, must be in [0, 1)")
        if vocab_size < 2:
            raise ValueError(f"label_smoothing needs 2 classes, the vocabulary has {vocab_size}")
        on_all = label_smoothing / (vocab_size - 1)
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is {z_loss}, must be at least 0")
    terms = _Terms(
        group=group,
        shard=shard,
        op=op or TorchVocabLoss(),
        on_target=1.0 - label_smoothing - on_all,
        on_all=on_all,
        z_loss=z_loss,
    )
    return cast(Tensor, _CrossEntropy.apply(logits, labels, terms))  # type: ignore[no-untyped-call]


def vocab_parallel_log_prob(
    logits: Tensor,
    labels: Tensor,
    group: Group | None = None,
    *,
    vocab_size: int,
    op: VocabLossOp | None = None,
) -> Tensor:
    """Return log p(label) of each token [T] in float32, the same on every rank, with gradient.

    Arguments, communication and gradient as in `vocab_parallel_cross_entropy`: every rank gets the
    gradient of its own columns, whether or not it holds the label's.
    """
    return -vocab_parallel_cross_entropy(logits, labels, group, vocab_size=vocab_size, op=op)


@dataclass(frozen=True, kw_only=True)
class _Terms:
    group: Group
    shard: VocabShard
    op: VocabLossOp
    on_target: float
    on_all: float
    z_loss: float

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        stats: tuple[Tensor, Tensor],
        grad: Tensor,
        out: Tensor,
    ) -> None:
        """Write the gradient of the real columns into `out`; stats: the maximum and the sum."""
        if not self.z_loss:
            self.op.backward(
                logits,
                labels,
                *stats,
                grad,
                on_target=self.on_target,
                on_all=self.on_all,
                out=out,
            )
            return
        maximum, sum_exp = stats
        self.op.gradient(
            logits,
            labels,
            *stats,
            on_softmax=grad * (1.0 + 2.0 * self.z_loss * (sum_exp.log() + maximum)),
            on_surprise=None,
            on_target=grad * self.on_target,
            on_all=grad * self.on_all if self.on_all else None,
            out=out,
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, terms: _Terms) -> Tensor:
        local = logits[:, : terms.shard.real]
        labels = labels - terms.shard.start
        maximum = all_reduce(terms.op.local_max(local), terms.group, op="max")
        partials = terms.op.partials(local, labels, maximum, smoothing=terms.on_all > 0.0)
        sum_exp, target, total = all_reduce(partials, terms.group).unbind()
        loss = sum_exp.log() - terms.on_target * target
        if terms.on_all:
            loss -= terms.on_all * total
        if terms.z_loss:
            loss += terms.z_loss * (sum_exp.log() + maximum).square()
        ctx.terms = terms
        ctx.save_for_backward(logits, labels, maximum, sum_exp)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, maximum, sum_exp = ctx.saved_tensors
        terms: _Terms = ctx.terms
        real = terms.shard.real
        dlogits = torch.empty_like(logits)
        dlogits[:, real:] = 0.0
        terms.gradient(logits[:, :real], labels, (maximum, sum_exp), grad, out=dlogits[:, :real])
        return dlogits, None, None

"""Losses and log-probabilities from what the head gets, some tokens at a time.

T tokens, t of them with hidden states here (T / tp under sequence parallelism), H hidden, v this
rank's (padded) share of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from mcore_kernels import (
    Kernels,
    LogitsChange,
    LossTerms,
    VocabShard,
    fused_head_log_probs,
    fused_head_loss,
    vocab_loss,
)
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_parallel import Group, all_reduce
from mcore_parallel.tensor import HeadUse, VocabParallelHead, vocab_parallel_cross_entropy

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The sum of the valid tokens' cross-entropy of a micro-batch / counts.tokens, and how.

    Tokens in the loss mask are valid, without one all are, but for those with label -100.
    label_smoothing, z_loss: as in `vocab_parallel_cross_entropy`. chunk_tokens: of how many tokens
    there are logits at a time; None: 1 GiB of them. unit_gradient: the backward pass will begin at
    this very number, with gradient 1: that of the head's weight is then added to its buffer in the
    forward pass, which otherwise takes a second buffer of its size.
    """

    counts: GlobalCounts
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    unit_gradient: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """ln p(label) [T] of the valid tokens of a micro-batch, and 0 of the others.

    Valid tokens are those of `TokenLoss`. Of tokens outside of the loss mask there are no logits at
    all. changes: what is done to the logits before, one after another, such as a temperature;
    chunk_tokens as in `TokenLoss`.
    """

    changes: tuple[LogitsChange, ...] = ()
    chunk_tokens: int | None = None


def takes_chunks(head: nn.Module | None) -> TypeGuard[VocabParallelHead]:
    """Whether the loss of a head's logits can be made in chunks."""
    # Factors in few bits have scales of the whole.
    return isinstance(head, VocabParallelHead) and not hasattr(head.linear, "encode")


def in_chunks(
    head: VocabParallelHead,
    batch: TokenBatch,
    wanted: TokenLoss | TokenLogProbs,
    kernels: Kernels,
    changes: Sequence[LogitsChange] = (),
) -> HeadUse:
    """What a head makes of its factors to get what is wanted: its logits are never whole.

    `changes` are made to the logits first. Communicates over the group of the head, numbers of
    tokens alone, once for each chunk; and what the changes do.

    Raises:
        ValueError: when called: a valid token's label is no class, which is looked at on the CPU
            only, since elsewhere it would cost a synchronisation; there the result is NaN.
    """
    if isinstance(wanted, TokenLoss):
        return _loss_in_chunks(head, batch, wanted, kernels, changes)
    return _log_probs_in_chunks(head, batch, wanted, kernels, changes)


def of_logits(
    logits: Tensor,
    batch: TokenBatch,
    wanted: TokenLoss | TokenLogProbs,
    *,
    group: Group,
    kernels: Kernels,
    vocab_size: int,
) -> Tensor:
    """The same from this rank's logits [T, v]; communicates over `group`."""
    if isinstance(wanted, TokenLoss):
        return _loss_of_logits(
            logits, batch, wanted, group=group, kernels=kernels, vocab_size=vocab_size
        )
    return _log_probs_of_logits(
        logits, batch, wanted, group=group, kernels=kernels, vocab_size=vocab_size
    )


def _loss_in_chunks(
    head: VocabParallelHead,
    batch: TokenBatch,
    loss: TokenLoss,
    kernels: Kernels,
    changes: Sequence[LogitsChange],
) -> HeadUse:
    labels, mask = _labels(batch, head.vocab_size), batch.loss_mask
    terms = LossTerms(
        label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, ignore_index=_IGNORED
    )

    def use(
        x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_out: Tensor | None
    ) -> Tensor:
        weights = mask
        if loss.unit_gradient:
            weights = loss.counts.mean(torch.ones_like(x[:, 0]).float() if mask is None else mask)
        total = fused_head_loss(
            x,
            weight,
            labels,
            linear=head.linear,
            op=kernels.cross_entropy,
            shard=_shard(head.vocab_size, head.shard.start, head.group),
            bias=bias,
            changes=changes,
            terms=terms,
            weights=weights,
            chunk_size=loss.chunk_tokens,
            weight_grad_out=weight_grad_out,
            add_later=not loss.unit_gradient,
        ).total
        return total if loss.unit_gradient else loss.counts.mean(total)

    return use


def _log_probs_in_chunks(
    head: VocabParallelHead,
    batch: TokenBatch,
    wanted: TokenLogProbs,
    kernels: Kernels,
    changes: Sequence[LogitsChange],
) -> HeadUse:
    labels, rows = _labels(batch, head.vocab_size), _valid(batch)

    def use(
        x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad_out: Tensor | None
    ) -> Tensor:
        found = fused_head_log_probs(
            x if rows is None else x.index_select(0, rows),
            weight,
            labels if rows is None else labels[rows],
            linear=head.linear,
            op=kernels.cross_entropy,
            shard=_shard(head.vocab_size, head.shard.start, head.group),
            bias=bias,
            changes=(*changes, *wanted.changes),
            chunk_size=wanted.chunk_tokens,
            weight_grad_out=weight_grad_out,
        ).log_prob
        return _placed(found, rows, labels)

    return use


def _loss_of_logits(
    logits: Tensor,
    batch: TokenBatch,
    loss: TokenLoss,
    *,
    group: Group,
    kernels: Kernels,
    vocab_size: int,
) -> Tensor:
    labels = _labels(batch, vocab_size)
    losses = vocab_parallel_cross_entropy(
        logits,
        labels,
        group,
        vocab_size=vocab_size,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        op=kernels.cross_entropy,
    )
    if batch.loss_mask is not None:
        losses = losses * batch.loss_mask
    losses = losses * torch.where(_strays(labels, vocab_size), torch.nan, 1.0)
    # Not the product alone: an unused token's loss may be infinite, and 0 · inf is NaN.
    losses = losses.masked_fill(labels == _IGNORED, 0.0)
    return loss.counts.mean(losses.sum())


def _log_probs_of_logits(
    logits: Tensor,
    batch: TokenBatch,
    wanted: TokenLogProbs,
    *,
    group: Group,
    kernels: Kernels,
    vocab_size: int,
) -> Tensor:
    labels, rows = _labels(batch, vocab_size), _valid(batch)
    first = logits.shape[-1] * group.rank
    logits = logits[:, : max(vocab_size - first, 0)]
    chosen = labels
    if rows is not None:
        logits, chosen = logits.index_select(0, rows), labels[rows]
    for change in wanted.changes:
        logits = _Changed.apply(logits, chosen, change)  # type: ignore[no-untyped-call]
    found = vocab_loss(
        logits, chosen, op=kernels.cross_entropy, shard=_shard(vocab_size, first, group)
    ).log_prob
    return _placed(found, rows, labels)


def _shard(vocab_size: int, first: int, group: Group) -> VocabShard:
    return VocabShard(
        vocab_size=vocab_size,
        first=first,
        reduce_max=partial(all_reduce, group=group, op="max"),
        reduce_sum=partial(all_reduce, group=group),
    )


def _labels(batch: TokenBatch, vocab_size: int) -> Tensor:
    """The labels [T], -100 outside of the loss mask; checked on the CPU."""
    labels = batch.labels
    assert labels is not None
    if batch.loss_mask is not None:
        labels = labels.masked_fill(batch.loss_mask == 0, _IGNORED)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        strays = labels[_strays(labels, vocab_size)]
        if strays.numel():
            raise ValueError(
                f"label {int(strays[0])} is outside the vocabulary of {vocab_size} "
                f"(0 to {vocab_size - 1}): give {_IGNORED}, or 0 in the loss mask, to leave it out"
            )
    return labels


def _strays(labels: Tensor, vocab_size: int) -> Tensor:
    """Which labels [T] are neither classes nor -100."""
    return ((labels < 0) & (labels != _IGNORED)) | (labels >= vocab_size)


def _valid(batch: TokenBatch) -> Tensor | None:
    """Which tokens are valid, [R] int64; None: all."""
    return None if batch.loss_mask is None else batch.loss_mask.nonzero()[:, 0]


def _placed(found: Tensor, rows: Tensor | None, labels: Tensor) -> Tensor:
    """What was found of `rows` among zeros [T]."""
    return found if rows is None else found.new_zeros(labels.shape).index_copy(0, rows, found)


class _Changed(torch.autograd.Function):
    """A change of whole logits, of which a copy is left as it was."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, change: LogitsChange) -> Tensor:
        changed, kept = change.forward(logits.clone(), labels)
        ctx.save_for_backward(kept)
        ctx.change, ctx.dtype = change, logits.dtype
        return changed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        again = None if kept is None else kept.clone()
        return ctx.change.backward(grad.clone(), again).to(ctx.dtype), None, None

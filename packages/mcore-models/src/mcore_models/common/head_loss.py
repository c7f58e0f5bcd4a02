"""The loss over the vocabulary from what the head gets, some tokens at a time.

T tokens, t of them with hidden states here (T / tp under sequence parallelism), H hidden, v this
rank's (padded) share of the vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from mcore_kernels import Kernels, LossTerms, VocabShard, fused_head_loss
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_parallel import Group, all_reduce
from mcore_parallel.tensor import HeadUse, VocabParallelHead, vocab_parallel_cross_entropy

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The sum of the valid tokens' cross-entropy of a micro-batch / counts.tokens, and how.

    Without a loss mask all tokens are valid. label_smoothing, z_loss: as in
    `vocab_parallel_cross_entropy`. chunk_tokens: of how many tokens there are logits at a time;
    None: 1 GiB of them. unit_gradient: the backward pass will begin at this very number, with
    gradient 1: that of the head's weight is then added to its buffer in the forward pass, which
    otherwise takes a second buffer of its size.
    """

    counts: GlobalCounts
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    unit_gradient: bool = False


def loss_of_logits(
    logits: Tensor,
    batch: TokenBatch,
    loss: TokenLoss,
    *,
    group: Group,
    kernels: Kernels,
    vocab_size: int,
) -> Tensor:
    """The loss, a scalar, from this rank's logits [T, v]; communicates over `group`."""
    assert batch.labels is not None
    losses = vocab_parallel_cross_entropy(
        logits,
        batch.labels,
        group,
        vocab_size=vocab_size,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        op=kernels.cross_entropy,
    )
    if batch.loss_mask is not None:
        # Not the product alone: an unused token's loss may be infinite, and 0 · inf is NaN.
        losses = (losses * batch.loss_mask).masked_fill(batch.loss_mask == 0, 0.0)
    return loss.counts.mean(losses.sum())


def takes_chunks(head: nn.Module | None) -> TypeGuard[VocabParallelHead]:
    """Whether the loss of a head's logits can be made in chunks: it is nothing but a product."""
    # Not of a subclass, which does something before; factors in few bits have scales of the whole.
    if type(head) is not VocabParallelHead or head.bias is not None:
        return False
    return not hasattr(head.linear, "encode")


def loss_in_chunks(
    head: VocabParallelHead, batch: TokenBatch, loss: TokenLoss, kernels: Kernels
) -> HeadUse:
    """What a head without bias makes of its factors to get the loss: its logits are never whole.

    Communicates over the group of the head, numbers of tokens alone, once for each chunk.
    """
    assert batch.labels is not None
    labels, mask = batch.labels, batch.loss_mask
    if mask is not None:
        labels = labels.masked_fill(mask == 0, _IGNORED)
    shard = VocabShard(
        vocab_size=head.vocab_size,
        first=head.shard.start,
        reduce_max=partial(all_reduce, group=head.group, op="max"),
        reduce_sum=partial(all_reduce, group=head.group),
    )
    terms = LossTerms(
        label_smoothing=loss.label_smoothing, z_loss=loss.z_loss, ignore_index=_IGNORED
    )

    def use(x: Tensor, weight: Tensor, weight_grad_out: Tensor | None) -> Tensor:
        weights = mask
        if loss.unit_gradient:
            weights = loss.counts.mean(torch.ones_like(x[:, 0]).float() if mask is None else mask)
        total = fused_head_loss(
            x,
            weight,
            labels,
            linear=head.linear,
            op=kernels.cross_entropy,
            shard=shard,
            terms=terms,
            weights=weights,
            chunk_size=loss.chunk_tokens,
            weight_grad_out=weight_grad_out,
            add_later=not loss.unit_gradient,
        ).total
        return total if loss.unit_gradient else loss.counts.mean(total)

    return use

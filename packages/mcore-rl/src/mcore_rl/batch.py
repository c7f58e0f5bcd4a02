"""From rollouts to the micro-batches that a policy loss is computed on.

T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mcore_models import TokenBatch
from mcore_rl.rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyBatch(TokenBatch):
    """A packed micro-batch of rollouts: every document is one, without its last token.

    `labels` are the next tokens, and all that is said of a place is about its label: `loss_mask` is
    1 where the policy wrote it. `behaviour`, `advantages`, `own_lengths` and `reference` are [T]
    float32, see `PolicyLossInput`.
    """

    behaviour: Tensor
    advantages: Tensor
    own_lengths: Tensor
    reference: Tensor | None = None


def policy_batch(
    rollouts: Sequence[Rollout], advantages: Sequence[float], *, multiple_of: int = 1
) -> PolicyBatch:
    """Pack rollouts with their advantages into one micro-batch, on the CPU.

    `multiple_of`: make T a multiple of it by a document of padding, which has mask 0.
    """
    sizes = [len(rollout.tokens) - 1 for rollout in rollouts]
    padding = -sum(sizes) % multiple_of
    documents = [*sizes, padding] if padding else sizes
    own = [rollout.response_length for rollout in rollouts]

    def row(values: list[list[int]] | list[list[float]], dtype: torch.dtype) -> Tensor:
        flat = [value for document in values for value in document]
        return torch.tensor([*flat, *[0] * padding], dtype=dtype)

    def spread(values: Sequence[float]) -> Tensor:
        pairs = zip(values, sizes, strict=True)
        return row([[value] * size for value, size in pairs], torch.float32)

    return PolicyBatch(
        tokens=row([list(rollout.tokens[:-1]) for rollout in rollouts], torch.int64),
        labels=row([list(rollout.tokens[1:]) for rollout in rollouts], torch.int64),
        loss_mask=row([[float(x) for x in r.own[1:]] for r in rollouts], torch.float32),
        positions=torch.tensor([i for size in documents for i in range(size)]),
        cu_seqlens=torch.tensor([*accumulate(documents, initial=0)], dtype=torch.int32),
        max_seqlen=max(documents),
        uniform=(len(documents), documents[0]) if len(set(documents)) == 1 else None,
        behaviour=row([list(rollout.logprobs[1:]) for rollout in rollouts], torch.float32),
        advantages=spread(advantages),
        own_lengths=spread(own),
    )


def micro_batches(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    micro_size: int,
    *,
    multiple_of: int = 1,
) -> list[PolicyBatch]:
    """Cut rollouts, in order, into micro-batches of `micro_size` each."""
    return [
        policy_batch(
            rollouts[start : start + micro_size],
            advantages[start : start + micro_size],
            multiple_of=multiple_of,
        )
        for start in range(0, len(rollouts), micro_size)
    ]

"""The attention over a sequence that is shared out, made from the name of a kind."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mcore_parallel.context.gather import AllGatherAttention
from mcore_parallel.context.heads import AllToAllAttention
from mcore_parallel.context.kinds import ContextKind
from mcore_parallel.context.ring import RingAttention
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, AttentionOp

__all__ = ["ContextAttentionOp", "context_attention"]


class ContextAttentionOp(AttentionOp, Protocol):
    """An `AttentionOp` over this rank's share of every document, as `SequenceSplit` cuts them."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        uniform: tuple[int, int] | None = None,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionOp`; rows and bounds are this rank's, the same bounds on all ranks.

        lengths: of the whole documents, without the rows that `DocumentPadding` added. Where tokens
        see later ones nobody else sees those rows; their own outputs are zeros or of no meaning,
        and without gradient. A causal mask hides them anyway.

        Raises:
            ValueError: queries and keys of other documents, or lengths that do not fit the rows.
        """


def context_attention(
    kind: str | ContextKind, group: Group, op: AttentionGradOp | None = None
) -> ContextAttentionOp:
    """Return the attention over the shares that the ranks of `group` hold of each document.

    It is called like any `AttentionOp`, with this rank's rows and their bounds, and knows of rows
    that were added. Layers of one model may use different kinds: all work on the same split.

    Args:
        kind: as `ContextKind` describes them: "ring", "all-gather", "all-to-all", "two-level" or
            "two-level:4".
        group: who shares the sequence, in the order of the split. A part of it is made here (by its
            members together) for two-level.
        op: the attention of one process; default plain torch.

    Raises:
        ValueError: an unknown kind, or inner ranks that do not divide the group.
    """
    kind = ContextKind.parse(kind) if isinstance(kind, str) else kind
    exchanging = kind.exchanging(group.size)
    if kind.name == "all-gather":
        return AllGatherAttention(group, op)
    if kind.name == "ring" or exchanging == 1:
        return RingAttention(group, op)
    if exchanging == group.size:
        return AllToAllAttention(group, op)
    inner = RingAttention(group, op, stride=exchanging)
    return AllToAllAttention(group.split(exchanging), inner)

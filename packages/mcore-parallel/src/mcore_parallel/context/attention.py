"""The attention over a sequence that is shared out, made from the name of a kind."""

from __future__ import annotations

from mcore_parallel.context.gather import AllGatherAttention
from mcore_parallel.context.heads import AllToAllAttention
from mcore_parallel.context.kinds import ContextKind
from mcore_parallel.context.ring import RingAttention
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, AttentionOp

__all__ = ["context_attention"]


def context_attention(
    kind: str | ContextKind, group: Group, op: AttentionGradOp | None = None
) -> AttentionOp:
    """Return the attention over the shares that the ranks of `group` hold of each document.

    It is called like any `AttentionOp`, with this rank's rows and their bounds. Layers of one model
    may use different kinds: all work on the same split.

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

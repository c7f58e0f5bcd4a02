"""The ways to attend over a sequence that is shared out, by name."""

from __future__ import annotations

import difflib
from typing import Literal, get_args

from mcore_parallel.context.gather import AllGatherAttention
from mcore_parallel.context.heads import AllToAllAttention, check_heads
from mcore_parallel.context.ring import RingAttention
from mcore_parallel.group import Group
from mcore_parallel.protocols import AttentionGradOp, AttentionOp

__all__ = ["ContextKind", "check_context_attention", "context_attention"]

ContextKind = Literal["ring", "all-gather", "all-to-all", "two-level"]


def context_attention(
    kind: str, group: Group, op: AttentionGradOp | None = None, *, inner: int | None = None
) -> AttentionOp:
    """Return the attention over the shares that the ranks of `group` hold of each document.

    It is called like any `AttentionOp`, with this rank's rows and their bounds. Layers of one model
    may use different kinds: all work on the same split.

    Args:
        kind: "ring", "all-gather", "all-to-all", or "two-level": all-to-all within parts of `inner`
            neighbouring ranks, a ring over the parts.
        group: who shares the sequence, in the order of the split. A part of it is made here (by its
            members together) for two-level.
        op: the attention of one process; default plain torch.
        inner: ranks of a part, for two-level alone.

    Raises:
        ValueError: an unknown kind, or `inner` is missing, superfluous or no divisor of the group.
    """
    _check_kind(kind, group.size, inner)
    if kind == "ring":
        return RingAttention(group, op)
    if kind == "all-gather":
        return AllGatherAttention(group, op)
    if kind == "all-to-all":
        return AllToAllAttention(group, op)
    assert inner is not None
    return AllToAllAttention(group.split(inner), RingAttention(group, op, stride=inner))


def check_context_attention(
    kind: str, size: int, *, num_heads: int, num_kv_heads: int, inner: int | None = None
) -> None:
    """Check, without any process, that `size` ranks can use a kind with so many heads.

    num_heads, num_kv_heads: of one tensor-parallel rank.

    Raises:
        ValueError: one line with the nearest values that fit.
    """
    _check_kind(kind, size, inner)
    if kind == "all-to-all":
        check_heads(num_heads, num_kv_heads, size)
    elif inner is not None:
        check_heads(num_heads, num_kv_heads, inner)


def _check_kind(kind: str, size: int, inner: int | None) -> None:
    kinds = get_args(ContextKind)
    if kind not in kinds:
        close = difflib.get_close_matches(kind, kinds, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"context attention {kind!r}: {hint}known are {', '.join(kinds)}")
    if kind != "two-level":
        if inner is not None:
            raise ValueError(
                f"context attention {kind!r} has no inner ranks, got inner={inner}: use two-level"
            )
        return
    if inner is None or inner < 1 or size % inner:
        divisors = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        raise ValueError(
            f"context attention 'two-level' over {size} ranks with inner={inner}: "
            f"inner must be one of {divisors}"
        )

"""Dealing out tokens that all ranks of a group hold alike, so that no token is computed twice.

T tokens; my share are consecutive rows, ceil(T / size) on the first ranks, fewer or none on the
last.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.collectives import gather_from_group, scatter_to_group
from mcore_parallel.group import Group

__all__ = ["join_shares", "share_of", "take_share"]


def share_of(total: int, group: Group) -> slice:
    """Return which of `total` tokens are mine."""
    size = -(-total // group.size)
    start = min(group.rank * size, total)
    return slice(start, min(start + size, total))


def take_share(x: Tensor, group: Group) -> Tensor:
    """Return my rows of `x` [T, ...], which is equal on all ranks.

    Backward: an all-gather over `group`, after which every rank has the gradient of all of `x`.
    """
    if group.size == 1:
        return x
    total = x.shape[0]
    mine = share_of(total, group)
    rows = scatter_to_group(_padded(x, -total % group.size), group, 0)
    return rows[: mine.stop - mine.start]


def join_shares(y: Tensor, group: Group, total: int) -> Tensor:
    """Return everybody's rows [total, ...] on every rank, from my share of them.

    Forward: an all-gather over `group`. Backward: my rows of the gradient.
    """
    if group.size == 1:
        return y
    size = -(-total // group.size)
    return gather_from_group(_padded(y, size - y.shape[0]), group, 0)[:total]


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows)) if rows else x

"""Communication that a linear layer starts before a product, and waits for after it."""

from __future__ import annotations

from torch import Tensor

from mcore_parallel.collectives import Work, all_gather_into, all_reduce_, reduce_scatter_into
from mcore_parallel.group import Group


def start_gather(x: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Start to gather rows; return the tensor that is being filled."""
    x = x.contiguous()
    full = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    return full, all_gather_into(full, x, group)


def start_reduction(
    dx: Tensor, group: Group, sequence_parallel: bool
) -> tuple[Tensor, Work | None]:
    """Start to sum over the group; return what will be the sum, of my rows in a sequence."""
    if group.size == 1:
        return dx, None
    dx = dx.contiguous()
    if not sequence_parallel:
        return dx, all_reduce_(dx, group)
    mine = dx.new_empty(dx.shape[0] // group.size, *dx.shape[1:])
    return mine, reduce_scatter_into(mine, dx, group)

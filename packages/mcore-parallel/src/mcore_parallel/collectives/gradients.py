"""Collectives with gradients.

Each backward is one of these functions again, so that gradients of gradients work too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.collectives.plain import (
    all_gather,
    all_reduce,
    all_to_all,
    my_slice,
    reduce_scatter,
)
from mcore_parallel.group import Group


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from_group(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_group(grad, ctx.group), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scatter_to_group(grad, ctx.group, ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return my_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_from_group(grad, ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_sequence(grad, ctx.group, ctx.dim), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_sequence(grad, ctx.group, ctx.dim), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
    ) -> Tensor:
        ctx.group, ctx.out_splits, ctx.in_splits = group, out_splits, in_splits
        return all_to_all(x, group, out_splits, in_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grad, ctx.group, ctx.in_splits, ctx.out_splits), None, None, None


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return `x`, equal on all ranks, for use by computations that differ; gradients are summed.

    Forward: identity. Backward: all-reduce.
    """
    return x if group.size == 1 else _apply(_CopyTo, x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Return the sum of every rank's `x`, for a computation that is the same on all ranks.

    Forward: all-reduce. Backward: identity.
    """
    return x if group.size == 1 else _apply(_ReduceFrom, x, group)


def gather_from_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return every rank's `x` concatenated along `dim`, for a computation equal on all ranks.

    Forward: all-gather. Backward: my slice of the gradient.
    """
    return x if group.size == 1 else _apply(_GatherFrom, x, group, dim)


def scatter_to_group(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return my slice along `dim` of `x`, which is equal on all ranks.

    Forward: slice. Backward: all-gather. ValueError when the size does not divide the dimension.
    """
    return x if group.size == 1 else _apply(_ScatterTo, x, group, dim)


def gather_sequence(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return every rank's `x` concatenated along `dim`, for computations that differ by rank.

    Forward: all-gather. Backward: reduce-scatter.
    """
    return x if group.size == 1 else _apply(_GatherSequence, x, group, dim)


def reduce_scatter_sequence(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return my slice along `dim` of the sum of every rank's `x`.

    Forward: reduce-scatter. Backward: all-gather. ValueError when the size does not divide it.
    """
    return x if group.size == 1 else _apply(_ReduceScatterSequence, x, group, dim)


def exchange(
    x: Tensor,
    group: Group,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> Tensor:
    """Return the rows that every rank sends me, as `all_to_all`; gradients travel back."""
    if group.size == 1:
        return all_to_all(x, group, out_splits, in_splits)
    return _apply(_Exchange, x, group, out_splits, in_splits)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result

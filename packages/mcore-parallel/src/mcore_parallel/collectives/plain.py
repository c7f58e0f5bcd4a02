"""Collectives whose result is new memory; they return when it is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel._checks import check_dim, check_divisible, check_member, check_splits
from mcore_parallel.faults import guarded
from mcore_parallel.group import Group

ReduceOp = Literal["sum", "max", "min", "avg"]
OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average for every dtype
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
T = TypeVar("T")


def all_reduce(x: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
    """Return the sum (maximum, minimum, average) of every rank's `x`, which all have one shape."""
    if op not in OPS:
        raise ValueError(f"all_reduce: op {op!r} is none of {', '.join(OPS)}")
    if group.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        with guarded("all_reduce", group):
            dist.all_reduce(out, op=OPS[op], group=group.process_group)
    if op == "avg":
        out /= group.size
    return out


def all_gather(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return every rank's `x` concatenated along `dim` in group order; all have one shape."""
    if group.size == 1:
        return x
    dim = check_dim(x, dim, "all_gather")
    out = x.new_empty((group.size, *x.shape))
    if x.numel():
        with guarded("all_gather", group):
            _torch.all_gather_into(out, x.contiguous(), group.process_group)
    if dim == 0:
        return out.flatten(0, 1)
    return out.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return my slice along `dim` of the sum of every rank's `x`.

    ValueError when the group's size does not divide that dimension.
    """
    if group.size == 1:
        return x
    dim = check_divisible(x, dim, group, "reduce_scatter")
    if not x.numel():
        return my_slice(x, group, dim)
    shape = (*x.shape[:dim], group.size, x.shape[dim] // group.size, *x.shape[dim + 1 :])
    parts = x.reshape(shape).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    with guarded("reduce_scatter", group):
        _torch.reduce_scatter_into(out, parts, group.process_group)
    return out


def broadcast(x: Tensor, src: int, group: Group) -> Tensor:
    """Return rank `src`'s `x`; the others pass a tensor of the same shape and dtype."""
    check_member(src, group, "broadcast")
    if group.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        with guarded("broadcast", group):
            dist.broadcast(_torch.bits(out), src=group.ranks[src], group=group.process_group)
    return out


def all_to_all(
    x: Tensor,
    group: Group,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> Tensor:
    """Send `in_splits[r]` rows of `x` to each rank r; return the rows received, in group order.

    `out_splits[r]` is the number of rows that come from rank r. Without splits every part has the
    same size, which must divide the rows of `x`. ValueError when the splits do not fit.
    """
    if x.dim() == 0:
        raise ValueError("all_to_all: a scalar has no rows; pass a tensor of one dimension or more")
    send = check_splits(in_splits, x.shape[0], group, "in_splits")
    receive = check_splits(out_splits, None if out_splits else x.shape[0], group, "out_splits")
    if send[group.rank] != receive[group.rank]:
        raise ValueError(
            f"all_to_all: rank {group.rank} sends itself {send[group.rank]} rows "
            f"but expects {receive[group.rank]}"
        )
    if group.size == 1:
        return x
    out = x.new_empty((sum(receive), *x.shape[1:]))
    width = math.prod(x.shape[1:])
    if width:
        with guarded("all_to_all", group):
            _torch.all_to_all_into(
                out,
                x.contiguous(),
                [n * width for n in receive],
                [n * width for n in send],
                group.process_group,
            )
    return out


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.size > 1:
        gloo = _torch.has_cpu_backend(group.process_group)
        devices = None if gloo else [torch.cuda.current_device()]
        with guarded("barrier", group):
            dist.barrier(group.process_group, device_ids=devices)


def all_gather_object(obj: T, group: Group) -> list[T]:
    """Return every rank's picklable object, in group order (over the group's CPU twin)."""
    if group.size == 1:
        return [obj]
    objects: list[Any] = [None] * group.size
    with guarded("all_gather_object", group):
        dist.all_gather_object(objects, obj, group=group.cpu.process_group)
    return objects


def broadcast_object(obj: T, src: int, group: Group) -> T:
    """Return rank `src`'s picklable object (over the group's CPU twin)."""
    check_member(src, group, "broadcast_object")
    if group.size == 1:
        return obj
    box: list[Any] = [obj if group.rank == src else None]
    with guarded("broadcast_object", group):
        dist.broadcast_object_list(box, src=group.ranks[src], group=group.cpu.process_group)
    result: T = box[0]
    return result


def my_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return a copy of my slice of `x`; ValueError when the size does not divide the dimension."""
    dim = check_divisible(x, dim, group, "scatter_to_group")
    length = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * length, length).clone(memory_format=torch.contiguous_format)

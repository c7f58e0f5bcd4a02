"""Collectives over a `Group`: plain, into given buffers, and with gradients.

Three rules hold for all of them:
- over a group of size 1 they are the identity and return their input;
- over a larger one a result is new memory, and no input is written to: only the functions whose
  name ends in `_` or `_into` write, into the buffer they are given;
- every rank of the group calls the same functions in the same order with the same shapes, except
  where splits are passed. A rank can only check its own arguments; TORCH_DISTRIBUTED_DEBUG=DETAIL
  makes torch compare those of all ranks. Sums are in the dtype of the input.

When a rank dies or stalls, the others raise `CollectiveError`, which names it and the operation.

`rank`, `src` and `dst` count within the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel._checks import (
    check_buffer,
    check_buffers,
    check_dim,
    check_divisible,
    check_member,
    check_peer,
    check_splits,
)
from mcore_parallel.faults import GuardedWork, guarded
from mcore_parallel.group import Group

ReduceOp = Literal["sum", "max", "min", "avg"]
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average for every dtype
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
T = TypeVar("T")


class Work(Protocol):
    """A communication under way; its buffers must be left alone until `wait` has returned."""

    def wait(self) -> Any:
        """Return once the result may be used (on CUDA: by the current stream)."""
        ...


class _Done:
    def wait(self) -> None:
        return None


# --- plain ------------------------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
    """Return the sum (maximum, minimum, average) of every rank's `x`, which all have one shape."""
    if op not in _OPS:
        raise ValueError(f"all_reduce: op {op!r} is none of {', '.join(_OPS)}")
    if group.size == 1:
        return x
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        with guarded("all_reduce", group):
            dist.all_reduce(out, op=_OPS[op], group=group.process_group)
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
        return _my_slice(x, group, dim)
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


# --- asynchronous, into given buffers -----------------------------------------------------------


def all_reduce_(x: Tensor, group: Group, op: ReduceOp = "sum") -> Work:
    """Start replacing the contiguous buffer `x` by the sum (maximum, minimum) over the group."""
    if op not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce_: op {op!r} is none of sum, max, min")
    check_buffer(x, "all_reduce_", "x")
    if group.size == 1 or not x.numel():
        return _Done()
    work = dist.all_reduce(x, op=_OPS[op], group=group.process_group, async_op=True)
    return GuardedWork(work, "all_reduce_", group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group) -> Work:
    """Start summing the contiguous buffer `x`, of size · out.numel() elements, into `out`.

    `out` receives slice number `rank` of the flattened sum. It may be that slice of `x` itself.
    """
    check_buffers(out, x, group, "reduce_scatter_into", larger=x)
    if group.size == 1:
        return _copy(out, x)
    if not x.numel():
        return _Done()
    work = _torch.reduce_scatter_into(out, x, group.process_group, async_op=True)
    return GuardedWork(work, "reduce_scatter_into", group)


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> Work:
    """Start gathering every rank's contiguous `x` into `out`, of size · x.numel() elements.

    `x` may be slice number `rank` of `out` itself.
    """
    check_buffers(out, x, group, "all_gather_into", larger=out)
    if group.size == 1:
        return _copy(out, x)
    if not x.numel():
        return _Done()
    work = _torch.all_gather_into(out, x, group.process_group, async_op=True)
    return GuardedWork(work, "all_gather_into", group)


def send_to(x: Tensor, dst: int, group: Group) -> Work:
    """Start sending the contiguous `x` to rank `dst` of the group."""
    check_peer(dst, group, "send_to")
    check_buffer(x, "send_to", "x")
    rank = group.ranks[dst]
    operation = f"send_to rank {rank}"
    with guarded(operation, group):
        work = _torch.send(x, rank, group.process_group)
    return GuardedWork(work, operation, group)


def receive_into(out: Tensor, src: int, group: Group) -> Work:
    """Start receiving into the contiguous `out` what rank `src` of the group sends."""
    check_peer(src, group, "receive_into")
    check_buffer(out, "receive_into", "out")
    rank = group.ranks[src]
    operation = f"receive_into from rank {rank}"
    with guarded(operation, group):
        work = _torch.receive(out, rank, group.process_group)
    return GuardedWork(work, operation, group)


# --- with gradients ---------------------------------------------------------------------------
# Each backward is one of these functions again, so that gradients of gradients work too.
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
        return _my_slice(x, group, dim)

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


def _my_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    dim = check_divisible(x, dim, group, "scatter_to_group")
    length = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * length, length).clone(memory_format=torch.contiguous_format)


def _copy(out: Tensor, x: Tensor) -> Work:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x.view_as(out))
    return _Done()

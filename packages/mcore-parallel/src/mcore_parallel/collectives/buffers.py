"""Collectives into given buffers, under way while something else is computed."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel._checks import check_buffer, check_buffers, check_peer
from mcore_parallel.collectives.plain import OPS, ReduceOp
from mcore_parallel.faults import GuardedWork, guarded
from mcore_parallel.group import Group


class Work(Protocol):
    """A communication under way; its buffers must be left alone until `wait` has returned."""

    def wait(self) -> Any:
        """Return once the result may be used (on CUDA: by the current stream)."""
        ...


class _Done:
    def wait(self) -> None:
        return None


def all_reduce_(x: Tensor, group: Group, op: ReduceOp = "sum") -> Work:
    """Start replacing the contiguous buffer `x` by the sum (maximum, minimum) over the group."""
    if op not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce_: op {op!r} is none of sum, max, min")
    check_buffer(x, "all_reduce_", "x")
    if group.size == 1 or not x.numel():
        return _Done()
    work = dist.all_reduce(x, op=OPS[op], group=group.process_group, async_op=True)
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


def _copy(out: Tensor, x: Tensor) -> Work:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x.view_as(out))
    return _Done()

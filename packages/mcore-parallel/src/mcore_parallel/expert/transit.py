"""Rows under way between ranks: an exchange that starts here and is waited for there.

What is computed in between hides it, and in the backward pass too: there the exchange of the
gradients starts where the forward pass waited, and is waited for where that one started. Autograd
works from the last operation to the first, so that the gradients of what was computed in between
are computed in between again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mcore_parallel import _torch
from mcore_parallel.collectives import Work, exchange
from mcore_parallel.faults import GuardedWork, guarded
from mcore_parallel.group import Group

__all__ = ["Transit", "start_exchange"]


class Transit:
    """An exchange under way; `wait` returns its result, once."""

    def __init__(self, rows: Tensor, ends: _Ends | None = None) -> None:
        self._rows = rows  # those received; those sent while there are ends
        self._ends = ends

    def wait(self) -> Tensor:
        """Return the rows received; on CUDA for use by the current stream."""
        if self._ends is None:
            return self._rows
        return cast(Tensor, _Finish.apply(self._rows, self._ends))  # type: ignore[no-untyped-call]


def start_exchange(
    x: Tensor,
    group: Group,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    *,
    overlap: bool = True,
) -> Transit:
    """Start sending `in_splits[r]` rows of `x` to each rank r of the group.

    `out_splits[r]` rows come from it. Gradients travel back in the same way. Without `overlap` the
    rows have arrived when this returns: the result is the same, bit for bit.
    """
    if group.size == 1 or not overlap or torch.is_anomaly_enabled():
        # Anomaly detection looks into gradients that are still under way.
        return Transit(exchange(x, group, out_splits, in_splits))
    ends = _Ends(group, tuple(out_splits), tuple(in_splits))
    sent = cast(Tensor, _Start.apply(x, ends))  # type: ignore[no-untyped-call]
    return Transit(sent, ends)


class _Ends:
    """What the two ends of an exchange share: the splits, and the messages under way."""

    def __init__(self, group: Group, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        self.group = group
        self.out_splits = out_splits
        self.in_splits = in_splits
        self._under_way: tuple[Work, Tensor, Tensor] | None = None

    def start(self, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> Tensor:
        """Return the buffer that will hold the rows."""
        x = x.contiguous()
        width = math.prod(x.shape[1:])
        out = x.new_empty((sum(receive), *x.shape[1:]))
        counts = [n * width for n in receive], [n * width for n in send]
        with guarded("start_exchange", self.group):
            work = _torch.all_to_all_into(out, x, *counts, self.group.process_group, async_op=True)
        # What is sent must not be used for anything else before it has left.
        self._under_way = GuardedWork(work, "start_exchange", self.group), out, x
        return out

    def finish(self) -> Tensor:
        """Return the buffer of the last `start` when it holds the rows."""
        assert self._under_way is not None, "finish without start"
        work, out, _ = self._under_way
        work.wait()
        self._under_way = None
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: _Ends) -> Tensor:
        ctx.ends = ends
        ends.start(x, ends.out_splits, ends.in_splits)
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.ends.finish()
        return grad, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, ends: _Ends) -> Tensor:
        ctx.ends = ends
        return ends.finish()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends: _Ends = ctx.ends
        return ends.start(grad, ends.in_splits, ends.out_splits), None

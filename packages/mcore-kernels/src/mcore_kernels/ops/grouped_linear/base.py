"""What the implementations of the grouped linear operator share: counts, and autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

Counts: TypeAlias = Sequence[int] | Tensor


class GroupedLinear(ABC):
    """`mcore_kernels.protocols.GroupedLinearOp` from its three products."""

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""

    @abstractmethod
    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""

    @abstractmethod
    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""

    def __call__(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`; ValueError unless there is a count for each expert."""
        if len(counts) != weight.shape[0]:
            raise ValueError(
                f"grouped_linear: {len(counts)} counts for the weights of {weight.shape[0]} experts"
            )
        return _GroupedLinear.apply(x, weight, counts, self)  # type: ignore[no-untyped-call,no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Counts, op: GroupedLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.op = counts, op
        return op.forward(x, weight, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.op.input_grad(grads[0], weight, ctx.counts)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(weight.dtype, torch.float32)
            dw = torch.zeros_like(weight, dtype=wide)
            ctx.op.weight_grad(grads[0], x, ctx.counts, dw)
            dw = dw.to(weight.dtype)
        return dx, dw, None, None


def slices(counts: Counts, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and which; a tensor of counts is read back for it.

    Raises:
        ValueError: the counts do not add up to the rows.
    """
    numbers = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if sum(numbers) != rows:
        raise ValueError(f"grouped_linear: counts add up to {sum(numbers)}, there are {rows} rows")
    for i, (stop, count) in enumerate(zip(accumulate(numbers), numbers, strict=True)):
        if count:
            yield i, slice(stop - count, stop)


def offsets(counts: Counts, device: torch.device) -> Tensor:
    """Where each expert's rows end, int32 [E], on the device; a tensor is not read back."""
    if isinstance(counts, Tensor):
        return counts.to(device).cumsum(0, dtype=torch.int32)
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)

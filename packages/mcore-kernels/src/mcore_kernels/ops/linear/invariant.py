"""Linear that takes rows in blocks of one size, so that a row's result is its own affair.

A matrix product chooses how it sums by its shape: a row alone and the same row among a thousand
then differ in the last bits. In blocks of one size the shape is always the same.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.ops.linear.reference import ReferenceLinear
from mcore_kernels.protocols import accumulation_dtype

ROWS = 64


class InvariantLinear(ReferenceLinear):
    """`mcore_kernels.protocols.LinearOp`; the weight gradient, a sum over rows, is torch's."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        y = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        return _in_blocks(x, weight.t())

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        return _in_blocks(dy, weight)


@torch.no_grad()
def _in_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    rows, dtype = x.shape[0], x.dtype
    if x.device.type == "cpu":
        # Its products of 16 bits pair neighbours, over the end of a row of odd length too: a NaN
        # there would reach the row before.
        x, matrix = x.to(accumulation_dtype(dtype)), matrix.to(accumulation_dtype(dtype))
    # A copy of its own: where x lies, and how, must not choose the product either.
    filled = F.pad(x, (0, 0, 0, -rows % ROWS)).clone(memory_format=torch.contiguous_format)
    y = x.new_empty(filled.shape[0], matrix.shape[1])
    for start in range(0, filled.shape[0], ROWS):
        torch.mm(filled[start : start + ROWS], matrix, out=y[start : start + ROWS])
    return y[:rows].to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, op: InvariantLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.op = op
        return op.forward(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, _ = ctx.needs_input_grad
        dx = ctx.op.input_grad(grads[0], weight) if needs_x else None
        return dx, ctx.op.weight_grad(grads[0], x) if needs_w else None, None


LINEAR = InvariantLinear()
"""The operator; it holds no state."""

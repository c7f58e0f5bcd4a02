"""The grouped linear operator as one product after another.

R rows sorted by expert, E experts, I input and O output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.grouped_linear.base import Counts, GroupedLinear, slices
from mcore_kernels.ops.grouped_linear.traced import traced
from mcore_kernels.ops.linear.reference import ReferenceLinear
from mcore_kernels.protocols import LinearOp


class ReferenceGroupedLinear(GroupedLinear):
    """`mcore_kernels.protocols.GroupedLinearOp` from a linear operator; counts are read back."""

    def __init__(self, linear: LinearOp | None = None) -> None:
        """`linear` computes the product of each expert; default: torch."""
        self.linear: LinearOp = linear or ReferenceLinear()

    def __call__(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinear`; one operator of torch where a compiler traces."""
        if torch.compiler.is_compiling() and len(counts) == weight.shape[0]:
            return traced(self, x, weight, counts)
        return super().__call__(x, weight, counts)

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        y = x.new_empty(x.shape[0], weight.shape[1])
        for i, rows in slices(counts, x.shape[0]):
            y[rows] = self.linear.forward(x[rows], weight[i])
        return y

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        dx = dy.new_empty(dy.shape[0], weight.shape[2])
        for i, rows in slices(counts, dy.shape[0]):
            dx[rows] = self.linear.input_grad(dy[rows], weight[i])
        return dx

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""
        for i, rows in slices(counts, x.shape[0]):
            self.linear.weight_grad(dy[rows], x[rows], out=out[i])

    def write_weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """Write what `weight_grad` would add to `out` over what is there."""
        out.zero_()
        self.weight_grad(dy, x, counts, out)

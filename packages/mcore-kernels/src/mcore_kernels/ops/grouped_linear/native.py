"""The grouped linear operator from torch's own grouped matrix product, and Triton's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.grouped_linear.base import Counts, offsets
from mcore_kernels.ops.grouped_linear.reference import ReferenceGroupedLinear
from mcore_kernels.ops.grouped_linear.triton import GROUPED as TRITON
from mcore_kernels.ops.linear.mixed import MixedLinear

MANY_ROWS = 2048
"""For each expert: a product of its own then fills the device."""


class NativeGroupedLinear(ReferenceGroupedLinear):
    """`mcore_kernels.protocols.GroupedLinearOp` on Hopper and later, for bfloat16.

    Torch's kernel rounds the weight gradient to 16 bits before it could be added to a float32
    buffer, so that this product is Triton's; with many rows for each expert it is taken expert by
    expert, for which counts are read back. Sizes that are no multiple of 8 (16 bytes, as its loads
    need) are served expert by expert in all products.
    """

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        if not _served(x, weight):
            return super().forward(x, weight, counts)
        with torch.no_grad():
            ends = offsets(counts, x.device)
            return torch._grouped_mm(_lying(x), _lying(weight).transpose(1, 2), offs=ends)

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        if not _served(dy, weight):
            return super().input_grad(dy, weight, counts)
        with torch.no_grad():
            return torch._grouped_mm(_lying(dy), _lying(weight), offs=offsets(counts, dy.device))

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""
        if _served(x, out) and x.shape[0] < MANY_ROWS * out.shape[0]:
            TRITON.weight_grad(dy, x, counts, out)
        else:
            super().weight_grad(dy, x, counts, out)

    def write_weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `ReferenceGroupedLinear`."""
        if _served(x, out) and x.shape[0] < MANY_ROWS * out.shape[0]:
            TRITON.write_weight_grad(dy, x, counts, out)
        else:
            super().write_weight_grad(dy, x, counts, out)


def _served(x: Tensor, weight: Tensor) -> bool:
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return aligned and x.shape[0] > 0 and weight.numel() > 0 and x.dtype == torch.bfloat16


def _lying(x: Tensor) -> Tensor:
    fits = x.stride(-1) == 1 and not any(
        step % 8 for step in (x.storage_offset(), *x.stride()[:-1])
    )
    return x if fits else x.clone(memory_format=torch.contiguous_format)


GROUPED = NativeGroupedLinear(MixedLinear())
"""The operator; it holds no state."""

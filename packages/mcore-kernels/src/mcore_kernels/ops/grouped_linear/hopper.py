"""The grouped linear operator on Hopper, from kernels whose loads the memory unit makes."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mcore_kernels.custom_ops import on_device, programs
from mcore_kernels.ops.grouped_linear.base import Counts, offsets
from mcore_kernels.ops.grouped_linear.hopper_kernels import weight_grad_kernel
from mcore_kernels.ops.grouped_linear.hopper_rows import rows_kernel
from mcore_kernels.ops.grouped_linear.native import NativeGroupedLinear
from mcore_kernels.ops.linear.mixed import MixedLinear
from mcore_kernels.tuning import tuned

ALIGNED = 16
"""Bytes that an address and a row must be a multiple of, for the memory unit."""


class HopperGroupedLinear(NativeGroupedLinear):
    """`mcore_kernels.protocols.GroupedLinearOp` for bfloat16 on compute capability 9.

    All products take counts on the device, and weight gradients go into the float32 buffer without
    a detour. What the kernels do not take (`takes_rows`, `takes_weight_grad`: sizes that steps or
    tiles do not divide, other dtypes, rows that are no multiple of 16 bytes) is served by
    `NativeGroupedLinear`.
    """

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        if takes_rows(x, weight):
            return _rows(x, weight, counts, k_last=True)
        return super().forward(x, weight, counts)

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        # A step must not reach the next expert's weight.
        if takes_rows(dy, weight) and weight.shape[1] % _row_sizes(dy.device)[2] == 0:
            return _rows(dy, weight, counts, k_last=False)
        return super().input_grad(dy, weight, counts)

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""
        if takes_weight_grad(dy, x, out):
            _weight_grad(dy, x, counts, out, add=True)
        else:
            super().weight_grad(dy, x, counts, out)

    def write_weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `ReferenceGroupedLinear`."""
        if takes_weight_grad(dy, x, out):
            _weight_grad(dy, x, counts, out, add=False)
        else:
            super().write_weight_grad(dy, x, counts, out)


def takes_rows(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes rows x [R, K or N] and weights [E, N, K]."""
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
        and _described_whole(x, weight)
    )


def takes_weight_grad(dy: Tensor, x: Tensor, out: Tensor) -> bool:
    """Whether the kernel takes dy [R, N], x [R, K] and the buffer [E, N, K]: whole tiles of N."""
    return (
        dy.dtype == x.dtype == torch.bfloat16
        and out.dtype == torch.float32
        and out.is_contiguous()
        and out.shape[1] % _weight_sizes(out.device)[0] == 0
        and _described_whole(dy, x, out)
    )


def _described_whole(*tensors: Tensor) -> bool:
    return all(
        one.numel() > 0
        and one.stride(-1) == 1
        and one.stride(-2) * one.element_size() % ALIGNED == 0
        and one.data_ptr() % ALIGNED == 0
        for one in tensors
    )


def _row_sizes(device: torch.device) -> tuple[int, ...]:
    return _sizes("grouped_rows_loads", device)


def _weight_sizes(device: torch.device) -> tuple[int, ...]:
    return _sizes("grouped_weight_grad_loads", device)


def _sizes(kernel: str, device: torch.device) -> tuple[int, ...]:
    """A tile's rows and columns, a step's depth, its stages, a buffer's width, and buffers."""
    return tuned(kernel, device, "block_m", "block_n", "block_k", "stages", "width", "buffers")


def _rows(x: Tensor, weight: Tensor, counts: Counts, *, k_last: bool) -> Tensor:
    """x_i w_iᵀ with `k_last`, x_i w_i without."""
    experts, *sides = weight.shape
    n, k = sides if k_last else reversed(sides)
    block_m, block_n, block_k, stages, width, buffers = _row_sizes(x.device)
    y = x.new_empty(x.shape[0], n)
    of_weight = (block_n, block_k) if k_last else (block_k, block_n)
    # No more tiles than these exist, however the rows are shared out.
    tiles = (-(-x.shape[0] // block_m) + experts) * -(-n // block_n)
    with on_device(x):
        rows_kernel[(min(tiles, programs(x, per_processor=1)),)](
            _described(x, block_m, block_k), _described(weight.flatten(0, 1), *of_weight),
            _described(y, block_m, width), y, x.new_zeros(1, dtype=torch.int32),
            offsets(counts, x.device), experts, n, k,
            STAGES=stages, BUFFERS=buffers, K_LAST=k_last, num_warps=8,
        )  # fmt: skip
    return y


def _weight_grad(dy: Tensor, x: Tensor, counts: Counts, out: Tensor, *, add: bool) -> None:
    experts, n_out, n_in = out.shape
    block_m, block_n, block_k, stages, width, buffers = _weight_sizes(out.device)
    tiles = experts * (n_out // block_m) * -(-n_in // block_n)
    with on_device(x):
        weight_grad_kernel[(min(tiles, programs(x, per_processor=1)),)](
            _described(dy, block_k, block_m), _described(x, block_k, block_n),
            _described(out.flatten(0, 1), block_m, width), x.new_zeros(1, dtype=torch.int32),
            offsets(counts, x.device), experts, n_out, n_in,
            STAGES=stages, BUFFERS=buffers, ADD=add, num_warps=8,
        )  # fmt: skip


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The tensor for the memory unit, in blocks that lie in shared memory as products want them."""
    dtype = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


GROUPED = HopperGroupedLinear(MixedLinear())
"""The operator; it holds no state."""

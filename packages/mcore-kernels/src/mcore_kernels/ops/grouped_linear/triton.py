"""The grouped linear operator in Triton. Imported only when it is chosen.

Where the experts' rows end is read on the device, so no count comes back to the host. Results and
input gradients are one persistent kernel: each program walks over the tiles of all experts. The
weight gradient has a program per tile and expert, which adds its sum to the buffer once.

Shapes: R rows sorted by expert, E experts, N output columns, K summed over; a tile is M × N.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import interpreted, on_device, programs
from mcore_kernels.ops.grouped_linear.base import Counts, offsets
from mcore_kernels.ops.grouped_linear.reference import ReferenceGroupedLinear
from mcore_kernels.tuning import tuned


@triton.jit
def _rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    ends_ptr,
    num_experts,
    n,
    k,
    stride_x,
    stride_expert,
    stride_n,
    stride_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(n, BLOCK_N)
    done = 0
    start = 0
    of_expert = w_ptr
    for expert in range(num_experts):
        end = tl.load(ends_ptr + expert)
        tiles_m = tl.cdiv(end - start, BLOCK_M)
        while tile < done + tiles_m * tiles_n:
            # Neighbouring programs share columns of the weight.
            local = tile - done
            row = start + local % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
            col = local // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
            at_x = x_ptr + row.to(tl.int64)[:, None] * stride_x
            at_w = of_expert + col[None, :] * stride_n
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for first in range(0, k, BLOCK_K):
                inner = first + tl.arange(0, BLOCK_K)
                x = tl.load(
                    at_x + inner[None, :],
                    mask=(row < end)[:, None] & (inner < k)[None, :],
                    other=0.0,
                )
                w = tl.load(
                    at_w + inner[:, None] * stride_k,
                    mask=(inner < k)[:, None] & (col < n)[None, :],
                    other=0.0,
                )
                if WIDEN:
                    x, w = x.to(tl.float32), w.to(tl.float32)
                total = tl.dot(x, w, total, input_precision=PRECISION)
            at_y = y_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
            mask = (row < end)[:, None] & (col < n)[None, :]
            tl.store(at_y, total.to(y_ptr.dtype.element_ty), mask=mask)
            tile += tl.num_programs(0)
        done += tiles_m * tiles_n
        start = end
        of_expert += stride_expert


@triton.jit
def _weight_grad_kernel(
    dy_ptr,
    x_ptr,
    out_ptr,
    ends_ptr,
    n_out,
    n_in,
    stride_dy,
    stride_x,
    stride_expert,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    WRITE: tl.constexpr,
):
    expert = tl.program_id(1)
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    tiles_in = tl.cdiv(n_in, BLOCK_N)
    of_out = tl.program_id(0) // tiles_in * BLOCK_M + tl.arange(0, BLOCK_M)
    of_in = tl.program_id(0) % tiles_in * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        dy = tl.load(
            dy_ptr + row.to(tl.int64)[None, :] * stride_dy + of_out[:, None],
            mask=(of_out < n_out)[:, None] & (row < end)[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * stride_x + of_in[None, :],
            mask=(row < end)[:, None] & (of_in < n_in)[None, :],
            other=0.0,
        )
        if WIDEN:
            dy, x = dy.to(tl.float32), x.to(tl.float32)
        total = tl.dot(dy, x, total, input_precision=PRECISION)
    if WRITE or end > start:
        at = out_ptr + expert.to(tl.int64) * stride_expert
        at += of_out[:, None] * stride_out + of_in[None, :]
        mask = (of_out < n_out)[:, None] & (of_in < n_in)[None, :]
        if WRITE:
            tl.store(at, total, mask=mask)
        else:
            # Nobody else adds there, so that the result is the same each time; but the sum is made
            # where the buffer lies, and no program waits for it.
            tl.atomic_add(at, total, mask=mask, sem="relaxed")


def _precision(x: Tensor) -> dict[str, object]:
    widen = interpreted(x)
    exact = widen or x.dtype == torch.float32
    return {"PRECISION": "ieee" if exact else "tf32", "WIDEN": widen}


def _tiles(kernel: str, x: Tensor) -> tuple[int, ...]:
    """Rows, columns and depth of a tile, warps and stages; float32 takes twice the room."""
    if x.dtype == torch.float32:
        return 64, 64, 32, 8, 3
    return tuned(kernel, x.device, "block_m", "block_n", "block_k", "warps", "stages")


def _size(n: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(n)))


class TritonGroupedLinear(ReferenceGroupedLinear):
    """`mcore_kernels.protocols.GroupedLinearOp`; float64 is served by the reference."""

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        if x.dtype == torch.float64:
            return super().forward(x, weight, counts)
        return _rows(x, weight.transpose(1, 2), counts)

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        if dy.dtype == torch.float64:
            return super().input_grad(dy, weight, counts)
        return _rows(dy, weight, counts)

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`; buffers but float32 ones are served by the reference."""
        if out.dtype != torch.float32 or x.dtype == torch.float64 or out.stride(2) != 1:
            super().weight_grad(dy, x, counts, out)
        elif x.shape[0] and out.numel():
            _weight_grad(dy, x, counts, out, write=False)

    def write_weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `ReferenceGroupedLinear`."""
        if out.dtype != torch.float32 or x.dtype == torch.float64 or out.stride(2) != 1:
            super().write_weight_grad(dy, x, counts, out)
        elif out.numel():
            _weight_grad(dy, x, counts, out, write=True)


def _weight_grad(dy: Tensor, x: Tensor, counts: Counts, out: Tensor, *, write: bool) -> None:
    """Add to `out`, or `write` over what is there."""
    dy, x = _lying(dy), _lying(x)
    experts, n_out, n_in = out.shape
    most_m, most_n, block_k, warps, stages = _tiles("grouped_weight_grad", x)
    blocks = _size(n_out, most_m), _size(n_in, most_n)
    grid = (triton.cdiv(n_out, blocks[0]) * triton.cdiv(n_in, blocks[1]), experts)
    with on_device(x):
        _weight_grad_kernel[grid](
            dy, x, out, offsets(counts, x.device), n_out, n_in, dy.stride(0), x.stride(0),
            out.stride(0), out.stride(1), BLOCK_M=blocks[0], BLOCK_N=blocks[1],
            BLOCK_K=block_k, WRITE=write, **_precision(x), num_warps=warps, num_stages=stages,
        )  # fmt: skip


def _rows(x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """x_i weight_i for x [R, K] and weight [E, K, N] of any strides → [R, N]."""
    experts, k, n = weight.shape
    y = x.new_empty(x.shape[0], n)
    if not y.numel():
        return y
    x = _lying(x)
    tokens = triton.cdiv(x.shape[0], experts)
    most_m, most_n, block_k, warps, stages = _tiles("grouped_rows", x)
    block_m, block_n = _size(tokens, most_m), _size(n, most_n)
    # No more tiles than these exist, however the rows are shared out.
    tiles = (triton.cdiv(x.shape[0], block_m) + experts) * triton.cdiv(n, block_n)
    with on_device(x):
        _rows_kernel[(min(tiles, programs(x, per_processor=1)),)](
            x, weight, y, offsets(counts, x.device), experts, n, k, x.stride(0), weight.stride(0),
            weight.stride(2), weight.stride(1), BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=_size(k, block_k), **_precision(x),
            num_warps=warps if block_m * block_n >= 8192 else 4, num_stages=stages,
        )  # fmt: skip
    return y


def _lying(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


GROUPED = TritonGroupedLinear()
"""The operator; it holds no state."""

"""RMS norm in Triton. Imported only when it is chosen, because it imports triton.

Shapes: N rows, H hidden. Each program holds ROWS × BLOCK elements, BLOCK ≥ H. The backward's
programs each walk over many rows and leave one partial gradient of the weight; their sum is
taken in a fixed order, so results repeat bit for bit on one machine.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, programs, rows


@triton.jit
def _forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, stride, n, h, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < n)[:, None] & (col < h)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / h + eps)
    w = tl.load(w_ptr + col, mask=col < h, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * w[None, :]
    tl.store(y_ptr + at * h + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < n)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    stride_dy,
    stride,
    n,
    h,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Each program takes one stretch of neighbouring rows, so that the next can be fetched ahead.
    share = tl.cdiv(tl.cdiv(n, ROWS), tl.num_programs(0)) * ROWS
    start = tl.program_id(0) * share
    stop = tl.minimum(start + share, n)
    col = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + col, mask=col < h, other=0.0).to(tl.float32)
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(start, stop, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & (col < h)[None, :]
        at = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + at * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at * stride_dy + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < n, other=0.0)[:, None]
        normed = x * rstd
        dw += dy * normed
        dyw = dy * w[None, :]
        mean = tl.sum(dyw * normed, axis=1)[:, None] / h
        dx = (dyw - normed * mean) * rstd
        tl.store(dx_ptr + at * h + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + tl.program_id(0) * h + col, tl.sum(dw, axis=0), mask=col < h)


def _tile(h: int) -> tuple[int, int, int]:
    """Rows and columns that one program holds, and its warps: about 4,096 elements or one row."""
    block = triton.next_power_of_2(h)
    return max(1, min(32, 4096 // block)), block, max(4, min(16, block // 512))


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _forward_fake(x, weight, eps)
    if x.numel():
        flat, h = rows(x), x.shape[-1]
        num_rows, block, warps = _tile(h)
        with on_device(x):
            _forward_kernel[(triton.cdiv(flat.shape[0], num_rows),)](
                flat, weight.contiguous(), y, rstd, flat.stride(0), flat.shape[0], h, eps,
                ROWS=num_rows, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return y, rstd


def _forward_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = _backward_fake(dy, x, weight, rstd)
    if not x.numel():
        return dx, dw.zero_()
    flat, dflat, h = rows(x), rows(dy), x.shape[-1]
    num_rows, block, warps = _tile(h)
    count = min(triton.cdiv(flat.shape[0], num_rows), programs(x, per_processor=4))
    # Rows fetched ahead wait in shared memory, of which some GPUs have 99 KB.
    stages = 3 if 2 * 3 * num_rows * block * x.element_size() <= 96 * 1024 else 1
    partial = x.new_empty((count, h), dtype=torch.float32)
    with on_device(x):
        _backward_kernel[(count,)](
            dflat, flat, weight.contiguous(), rstd, dx, partial, dflat.stride(0), flat.stride(0),
            flat.shape[0], h, ROWS=num_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def _backward_fake(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


_LIBRARY = OpLibrary()
_rms_norm = _LIBRARY.define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _forward, fake=_forward_fake
)
_rms_norm_backward = _LIBRARY.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dy: Tensor, drstd: Tensor) -> tuple[Tensor, Tensor, None]:
    dx, dw = _rms_norm_backward(dy, *ctx.saved_tensors)
    return dx, dw, None


_LIBRARY.differentiate("rms_norm", _gradients, keep=_keep)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    return _rms_norm(x, weight, eps)[0]

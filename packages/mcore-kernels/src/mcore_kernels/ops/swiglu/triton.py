"""SwiGLU in Triton. Imported only when it is chosen, because it imports triton.

Shapes: N rows, F feed-forward. A program takes BLOCK columns of one row's gate and up. Only the
input is kept for the backward.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, rows
from mcore_kernels.ops.swiglu.reference import check_even


@triton.jit
def _forward_kernel(x_ptr, y_ptr, stride, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < f
    gate = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + f + col, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * f + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, dx_ptr, stride_dy, stride, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < f
    gate = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + f + col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dy + col, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * s * (1.0 + gate * (1.0 - s))
    dup = dy * gate * s
    at = dx_ptr + row * 2 * f + col
    tl.store(at, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(at + f, dup.to(dx_ptr.dtype.element_ty), mask=mask)


def _grid(num_rows: int, f: int) -> tuple[tuple[int, int], int]:
    block = min(2048, max(128, triton.next_power_of_2(f)))
    return (num_rows, triton.cdiv(f, block)), block


def _forward(gate_up: Tensor) -> Tensor:
    y = _forward_fake(gate_up)
    if y.numel():
        flat = rows(gate_up)
        grid, block = _grid(flat.shape[0], y.shape[-1])
        with on_device(y):
            _forward_kernel[grid](flat, y, flat.stride(0), y.shape[-1], BLOCK=block)
    return y


def _forward_fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    dx = _backward_fake(dy, gate_up)
    if dx.numel():
        flat, dflat = rows(gate_up), rows(dy)
        grid, block = _grid(flat.shape[0], dy.shape[-1])
        with on_device(dx):
            _backward_kernel[grid](
                dflat, flat, dx, dflat.stride(0), flat.stride(0), dy.shape[-1], BLOCK=block
            )
    return dx


def _backward_fake(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


_LIBRARY = OpLibrary()
_swiglu = _LIBRARY.define("swiglu(Tensor gate_up) -> Tensor", _forward, fake=_forward_fake)
_swiglu_backward = _LIBRARY.define(
    "swiglu_backward(Tensor dy, Tensor gate_up) -> Tensor", _backward, fake=_backward_fake
)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradients(ctx: Any, dy: Tensor) -> Tensor:
    return _swiglu_backward(dy, *ctx.saved_tensors)


_LIBRARY.differentiate("swiglu", _gradients, keep=_keep)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `mcore_kernels.protocols.SwigluOp`; ValueError when the last dim is odd."""
    check_even(gate_up)
    return _swiglu(gate_up)

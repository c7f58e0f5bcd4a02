"""Activations in Triton, gated or not, with bias, clamp and a weight per row.

Imported only when one of them is chosen, because it imports triton. One kernel each way; what an
operator does not have is compiled away. Only the arguments are kept for the backward.

Shapes: N rows, F feed-forward. A program takes BLOCK columns of one row.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, rows
from mcore_kernels.ops.gelu.reference import check_approximate
from mcore_kernels.ops.glu.formulas import FORMULAS, check_activation
from mcore_kernels.ops.glu.reference import bias_grad, check_glu, check_weights
from mcore_kernels.ops.swiglu.reference import check_even
from mcore_kernels.tuning import tuned

_NUMBERS = {name: number for number, name in enumerate(FORMULAS)}
_SILU = tl.constexpr(_NUMBERS["silu"])
_GELU = tl.constexpr(_NUMBERS["gelu"])
_GELU_TANH = tl.constexpr(_NUMBERS["gelu_tanh"])
_QUICK_GELU = tl.constexpr(_NUMBERS["quick_gelu"])
_RELU = tl.constexpr(_NUMBERS["relu"])
_SQUARED_RELU = tl.constexpr(_NUMBERS["squared_relu"])


@triton.jit
def _normal(x, BITS: tl.constexpr):
    """The normal distribution function, to a small part of a unit in the last place of BITS."""
    if BITS == 8:
        # The logistic function of an odd polynomial, fitted to 3e-4 of the value up to |x| = 6.5;
        # beyond, the smaller of the two tails is below 4e-11.
        u = tl.where(x * x > 42.25, 42.25, x * x)
        p = 1.2990183373418063e-09 - 7.506600376017136e-12 * u
        p = 3.1714882879896322e-06 + u * (-9.071652584680123e-08 + u * p)
        p = -0.0004553668259177357 + u * (-4.8956539103528485e-05 + u * p)
        p = 1.594933032989502 + u * (0.0737328827381134 + u * p)
        return tl.sigmoid(x * p)
    if BITS == 11:
        # erfc by a Chebyshev fit of its logarithm (Press et al., "Numerical Recipes", 6.2.2).
        z = tl.abs(x) * 0.7071067811865476
        t = 1.0 / (1.0 + 0.5 * z)
        p = -0.82215223 + t * 0.17087277
        p = -1.13520398 + t * (1.48851587 + t * p)
        p = -0.18628806 + t * (0.27886807 + t * p)
        p = 0.37409196 + t * (0.09678418 + t * p)
        p = -1.26551223 + t * (1.00002368 + t * p)
        tail = 0.5 * t * tl.exp(p - z * z)
        return tl.where(x < 0.0, tail, 1.0 - tail)
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _value(x, KIND: tl.constexpr, BITS: tl.constexpr):
    # Comparisons are written so that NaN falls through to the formula, which keeps it.
    if KIND == _SILU:
        return x * tl.sigmoid(x)
    if KIND == _GELU:
        return x * _normal(x, BITS)
    if KIND == _GELU_TANH:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if KIND == _QUICK_GELU:
        return x * tl.sigmoid(1.702 * x)
    if KIND == _RELU:
        return tl.where(x <= 0.0, 0.0, x)
    if KIND == _SQUARED_RELU:
        return tl.where(x <= 0.0, 0.0, x * x)
    return tl.sigmoid(x)


@triton.jit
def _slope(x, KIND: tl.constexpr, BITS: tl.constexpr):
    if KIND == _SILU:
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    if KIND == _GELU:
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        return _normal(x, BITS) + x * density
    if KIND == _GELU_TANH:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return s + tl.where(s * (1.0 - s) == 0.0, 0.0, x * s * (1.0 - s) * inner)
    if KIND == _QUICK_GELU:
        s = tl.sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    if KIND == _RELU:
        return tl.where(x <= 0.0, 0.0, 1.0)
    if KIND == _SQUARED_RELU:
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    s = tl.sigmoid(x)
    return s * (1.0 - s)


@triton.jit
def _load(at, b_ptr, col, mask, BIAS: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(b_ptr + col, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _forward_kernel(
    x_ptr,
    b_ptr,
    p_ptr,
    y_ptr,
    stride,
    f,
    limit,
    offset,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < f
    x = _load(x_ptr + row * stride + col, b_ptr, col, mask, BIAS)
    if CLAMP:
        x = tl.where(x > limit, limit, x)
    y = _value(x, KIND, BITS)
    if GATED:
        up = _load(x_ptr + row * stride + f + col, b_ptr + f, col, mask, BIAS)
        if CLAMP:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y *= up + offset
    if WEIGHTS:
        y *= tl.load(p_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * f + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    p_ptr,
    dx_ptr,
    dp_ptr,
    stride_dy,
    stride,
    f,
    limit,
    offset,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMP: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    col = part * BLOCK + tl.arange(0, BLOCK)
    mask = col < f
    raw = _load(x_ptr + row * stride + col, b_ptr, col, mask, BIAS)
    dy = tl.load(dy_ptr + row * stride_dy + col, mask=mask, other=0.0).to(tl.float32)
    x = raw
    if CLAMP:
        x = tl.where(raw > limit, limit, raw)
    y = _value(x, KIND, BITS)
    if GATED:
        raw_up = _load(x_ptr + row * stride + f + col, b_ptr + f, col, mask, BIAS)
        up = raw_up
        if CLAMP:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up += offset
    if WEIGHTS:
        share = dy * y
        if GATED:
            share *= up
        total = tl.sum(tl.where(mask, share, 0.0), axis=0)
        tl.store(dp_ptr + row * tl.num_programs(1) + part, total)
        dy *= tl.load(p_ptr + row).to(tl.float32)
    at = dx_ptr + row * f + col
    if GATED:
        at += row * f
        dup = dy * y
        if CLAMP:
            dup = tl.where((raw_up > limit) | (raw_up < -limit), 0.0, dup)
        tl.store(at + f, dup.to(dx_ptr.dtype.element_ty), mask=mask)
        dy *= up
    dx = dy * _slope(x, KIND, BITS)
    if CLAMP:
        dx = tl.where(raw > limit, 0.0, dx)
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _grid(kernel: str, x: Tensor, f: int) -> tuple[tuple[int, int], int, int]:
    most, warps = tuned(kernel, x.device, "block", "warps")
    block = min(most, max(128, triton.next_power_of_2(f)))
    return (x.shape[0], triton.cdiv(f, block)), block, warps


def _options(
    x: Tensor, bias: Tensor | None, weights: Tensor | None, kind: int, gated: bool, limit: float
) -> dict[str, Any]:
    return {
        "BITS": {torch.float16: 11, torch.bfloat16: 8}.get(x.dtype, 24),
        "KIND": kind,
        "GATED": gated,
        "BIAS": bias is not None,
        "CLAMP": limit > 0.0,
        "WEIGHTS": weights is not None,
    }


def _forward(
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    kind: int,
    gated: bool,
    limit: float,
    offset: float,
) -> Tensor:
    y = _forward_fake(x, bias, weights, kind, gated, limit, offset)
    if y.numel():
        flat = rows(x)
        grid, block, warps = _grid("activation", flat, y.shape[-1])
        with on_device(y):
            _forward_kernel[grid](
                flat, _lying(bias, flat), _lying(weights, flat), y, flat.stride(0), y.shape[-1],
                limit, offset, **_options(flat, bias, weights, kind, gated, limit), BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
    return y


def _forward_fake(
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    kind: int,
    gated: bool,
    limit: float,
    offset: float,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1]))


def _lying(x: Tensor | None, instead: Tensor) -> Tensor:
    """x in one piece; any pointer where there is none, as the kernel will not read it."""
    return instead if x is None else x.contiguous()


def _backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    kind: int,
    gated: bool,
    limit: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    dx, dp = _backward_fake(dy, x, bias, weights, kind, gated, limit, offset)
    if not dy.numel():
        return dx, dp.zero_()
    flat, dflat = rows(x), rows(dy)
    options = _options(flat, bias, weights, kind, gated, limit)
    if weights is not None:
        options["BITS"] = 24  # their gradient is a sum, and may be of a wider dtype than x
    grid, block, warps = _grid("activation_backward", flat, dy.shape[-1])
    parts = flat.new_empty(grid if weights is not None else (0,), dtype=torch.float32)
    with on_device(dx):
        _backward_kernel[grid](
            dflat, flat, _lying(bias, flat), _lying(weights, flat), dx, parts, dflat.stride(0),
            flat.stride(0), dy.shape[-1], limit, offset, **options, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    if weights is not None:
        dp = parts.sum(1).to(weights.dtype).view(weights.shape)
    return dx, dp


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    kind: int,
    gated: bool,
    limit: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weights is None else weights.new_empty(
        weights.shape
    )


_LIBRARY = OpLibrary()
_activation = _LIBRARY.define(
    "activation(Tensor x, Tensor? bias, Tensor? weights, int kind, bool gated, float limit, "
    "float offset) -> Tensor",
    _forward,
    fake=_forward_fake,
)
_activation_backward = _LIBRARY.define(
    "activation_backward(Tensor dy, Tensor x, Tensor? bias, Tensor? weights, int kind, "
    "bool gated, float limit, float offset) -> (Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias, weights = ctx.saved_tensors
    dx, dp = _activation_backward(dy, x, bias, weights, *ctx.options)
    return (
        dx, bias_grad(dx, bias), None if weights is None else dp, None, None, None, None
    )  # fmt: skip


_LIBRARY.differentiate("activation", _gradients, keep=_keep)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `mcore_kernels.protocols.SwigluOp`; ValueError when the last dim is odd."""
    check_even(gate_up)
    return _activation(gate_up, None, None, _NUMBERS["silu"], True, 0.0, 0.0)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """See `mcore_kernels.protocols.GeluOp`; ValueError for another `approximate`."""
    check_approximate(approximate)
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    return _activation(x, None, None, _NUMBERS[name], False, 0.0, 0.0)


def glu(
    gate_up: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    offset: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """See `mcore_kernels.protocols.GluOp`; ValueError for an odd size or an unknown name."""
    check_glu(gate_up, activation, limit, weights)
    return _activation(gate_up, bias, weights, _NUMBERS[activation], True, limit or 0.0, offset)


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    weights: Tensor | None = None,
) -> Tensor:
    """See `mcore_kernels.protocols.ActivationOp`; ValueError for an unknown name."""
    check_activation("activation", activation)
    check_weights("activation", x, weights)
    return _activation(x, bias, weights, _NUMBERS[activation], False, 0.0, 0.0)

"""Normalisations in Triton: RMS, layer, L2, and RMS behind the sum with a residual.

Imported only when one of them is chosen, because it imports triton. One kernel each way; what an
operator does not have is compiled away.

Shapes: N rows, H hidden. Each program holds ROWS × BLOCK elements, BLOCK ≥ H. The backward's
programs each walk over many rows and leave one partial gradient of weight and bias; their sum is
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
from mcore_kernels.ops.add_rms_norm.reference import check_same_shape
from mcore_kernels.tuning import tuned


@triton.jit
def _factor(w_ptr, col, known, ZERO_CENTERED: tl.constexpr):
    w = tl.load(w_ptr + col, mask=known, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        w += 1.0
    return w


@triton.jit
def _forward_kernel(
    x_ptr,
    r_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    stride,
    stride_r,
    n,
    h,
    share,
    eps,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    known = col < h
    mask = (row < n)[:, None] & known[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + at * stride_r + col[None, :], mask=mask, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at * h + col[None, :], total, mask=mask)
        x = total.to(tl.float32)  # of what is passed on, as two operators would
    if CENTER:
        mean = tl.sum(x, axis=1) / h
        tl.store(mean_ptr + row, mean, mask=row < n)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) * share + eps)
    y = x * rstd[:, None]
    if WEIGHT:
        y *= _factor(w_ptr, col, known, ZERO_CENTERED)[None, :]
    if BIAS:
        y += tl.load(b_ptr + col, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + at * h + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < n)


@triton.jit
def _backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    stride_dy,
    stride_dtotal,
    stride,
    n,
    h,
    share,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Each program takes one stretch of neighbouring rows, so that the next can be fetched ahead.
    stretch = tl.cdiv(tl.cdiv(n, ROWS), tl.num_programs(0)) * ROWS
    start = tl.program_id(0) * stretch
    stop = tl.minimum(start + stretch, n)
    col = tl.arange(0, BLOCK)
    known = col < h
    if WEIGHT:
        w = _factor(w_ptr, col, known, ZERO_CENTERED)
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if BIAS:
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(start, stop, ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        mask = (row < n)[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + at * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at * stride_dy + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < n, other=0.0)[:, None]
        if CENTER:
            x = tl.where(mask, x - tl.load(mean_ptr + row, mask=row < n, other=0.0)[:, None], 0.0)
        normed = x * rstd
        if BIAS:
            db += dy
        if WEIGHT:
            dw += dy * normed
            dy *= w[None, :]
        dx = dy - normed * (tl.sum(dy * normed, axis=1)[:, None] * share)
        if CENTER:
            dx -= tl.sum(dy, axis=1)[:, None] / h
        dx *= rstd
        if ADD:
            # Rounded before the sum, as the gradients of two operators would be: whether a sum is
            # taken in the pass of the norm or before it makes no difference then.
            source = dtotal_ptr + at * stride_dtotal + col[None, :]
            passed = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            dx = dx.to(dx_ptr.dtype.element_ty).to(tl.float32) + passed
        tl.store(dx_ptr + at * h + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if WEIGHT:
        tl.store(dw_ptr + tl.program_id(0) * h + col, tl.sum(dw, axis=0), mask=known)
    if BIAS:
        tl.store(db_ptr + tl.program_id(0) * h + col, tl.sum(db, axis=0), mask=known)


def _tile(kernel: str, x: Tensor, h: int) -> tuple[int, int, int]:
    """Rows and columns that one program holds, and its warps: so many elements, or one row."""
    elements, of_warp, most = tuned(kernel, x.device, "elements", "elements_of_warp", "most_warps")
    block = triton.next_power_of_2(h)
    rows = max(1, min(32, elements // block))
    return rows, block, max(4, min(most, rows * block // of_warp))


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    zero_centered: bool,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, total, mean, rstd = _forward_fake(
        x, residual, weight, bias, eps, center, zero_centered, unit
    )
    if x.numel():
        flat, h = rows(x), x.shape[-1]
        other = flat if residual is None else rows(residual)
        num_rows, block, warps = _tile("norm", x, h)
        with on_device(x):
            _forward_kernel[(triton.cdiv(flat.shape[0], num_rows),)](
                flat, other, _lying(weight, flat), _lying(bias, flat), y, total, mean, rstd,
                flat.stride(0), other.stride(0), flat.shape[0], h, 1.0 if unit else 1.0 / h, eps,
                ADD=residual is not None, CENTER=center, WEIGHT=weight is not None,
                BIAS=bias is not None, ZERO_CENTERED=zero_centered, ROWS=num_rows, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
    return y, total, mean, rstd


def _forward_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    center: bool,
    zero_centered: bool,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = x.new_empty(x.shape[:-1] if center else (0,), dtype=torch.float32)
    if residual is None:
        total = x.new_empty(0)
    else:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape), total, mean, stats


def _lying(weight: Tensor | None, instead: Tensor) -> Tensor:
    """The weight in one piece; any pointer where there is none, as the kernel will not read it."""
    return instead if weight is None else weight.contiguous()


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _backward_fake(dy, dtotal, source, weight, bias, mean, rstd, zero_centered, unit)
    if not source.numel():
        return dx, dw.zero_(), db.zero_()
    flat, dflat, h = rows(source), rows(dy), source.shape[-1]
    num_rows, block, warps = _tile("norm_backward", source, h)
    per_processor, stages = tuned("norm_backward", source.device, "per_processor", "stages")
    most = programs(source, per_processor=per_processor)
    count = min(triton.cdiv(flat.shape[0], num_rows), most)
    # Rows fetched ahead wait in shared memory, of which some GPUs have 99 KB.
    if 2 * stages * num_rows * block * source.element_size() > 96 * 1024:
        stages = 1
    passed = dflat if dtotal is None else rows(dtotal)
    partial_w = flat.new_empty((count if weight is not None else 0, h), dtype=torch.float32)
    partial_b = flat.new_empty((count if bias is not None else 0, h), dtype=torch.float32)
    with on_device(source):
        _backward_kernel[(count,)](
            dflat, passed, flat, _lying(weight, flat), mean, rstd, dx, partial_w, partial_b,
            dflat.stride(0), passed.stride(0), flat.stride(0), flat.shape[0], h,
            1.0 if unit else 1.0 / h, ADD=dtotal is not None, CENTER=mean.numel() > 0,
            WEIGHT=weight is not None, BIAS=bias is not None, ZERO_CENTERED=zero_centered,
            ROWS=num_rows, BLOCK=block, STAGES=stages, num_warps=warps,
        )  # fmt: skip
    if weight is not None:
        dw = partial_w.sum(0).to(weight.dtype)
    if bias is not None:
        db = partial_b.sum(0).to(bias.dtype)
    return dx, dw, db


def _backward_fake(
    dy: Tensor,
    dtotal: Tensor | None,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    unit: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = source.new_empty(0)
    return (
        source.new_empty(source.shape),
        nothing if weight is None else weight.new_empty(weight.shape),
        source.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


_LIBRARY = OpLibrary()
_norm = _LIBRARY.define(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool center, "
    "bool zero_centered, bool unit) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    fake=_forward_fake,
)
_norm_backward = _LIBRARY.define(
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor source, Tensor? weight, Tensor? bias, "
    "Tensor mean, Tensor rstd, bool zero_centered, bool unit) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, _, ctx.zero_centered, ctx.unit = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, weight, bias, mean, rstd)
    ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
    ctx.mark_non_differentiable(mean, rstd)


def _gradients(
    ctx: Any, dy: Tensor, dtotal: Tensor, dmean: Tensor, drstd: Tensor
) -> tuple[Tensor | None, ...]:
    source, weight, bias, mean, rstd = ctx.saved_tensors
    of_x, of_residual = ctx.dtypes
    dx, dw, db = _norm_backward(
        dy, None if of_residual is None else dtotal, source, weight, bias, mean, rstd,
        ctx.zero_centered, ctx.unit,
    )  # fmt: skip
    return (
        dx.to(of_x),
        None if of_residual is None else dx.to(of_residual),
        None if weight is None else dw,
        None if bias is None else db,
        None, None, None, None,
    )  # fmt: skip


_LIBRARY.differentiate("norm", _gradients, keep=_keep)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    return _norm(x, None, weight, None, eps, False, zero_centered, False)[0]


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """See `mcore_kernels.protocols.LayerNormOp`."""
    return _norm(x, None, weight, bias, eps, True, zero_centered, False)[0]


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.L2NormOp`."""
    return _norm(x, None, None, None, eps, False, False, True)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.AddRmsNormOp`; ValueError when the shapes differ."""
    check_same_shape(x, residual)
    y, total, _, _ = _norm(x, residual, weight, None, eps, False, zero_centered, False)
    return y, total

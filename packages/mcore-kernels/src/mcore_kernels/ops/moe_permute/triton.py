"""Permuting tokens in Triton. Imported only when it is chosen, because it imports triton.

Two kernels: tokens spread over their rows (with a weight each), and tokens summed from them. Each
is the other's gradient. Shapes: T tokens, K copies of each, H hidden, R rows. A program takes BLOCK
columns of one row or token.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, rows
from mcore_kernels.ops.moe_permute.assignment import Assignment
from mcore_kernels.ops.moe_permute.reference import ReferencePermute
from mcore_kernels.tuning import tuned


@triton.jit
def _spread_kernel(
    x_ptr, w_ptr, places_ptr, y_ptr, stride, copies, h, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    # From tokens to rows, so that a token is read once for all its copies.
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride + col, mask=col < h)
    for j in range(copies):
        place = tl.load(places_ptr + token * copies + j)
        y = x
        if WEIGHTS:
            y = x.to(tl.float32) * tl.load(w_ptr + token * copies + j).to(tl.float32)
        kept = (col < h) & (place >= 0)
        tl.store(y_ptr + place * h + col, y.to(y_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _combine_kernel(
    x_ptr, w_ptr, places_ptr, y_ptr, stride, copies, h, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(copies):
        place = tl.load(places_ptr + token * copies + j)
        kept = (col < h) & (place >= 0)
        x = tl.load(x_ptr + place * stride + col, mask=kept, other=0.0).to(tl.float32)
        if WEIGHTS:
            w = tl.load(w_ptr + token * copies + j).to(tl.float32)
            # A dropped copy adds nothing, whatever its weight is.
            x = tl.where(kept, x * w, 0.0)
        total += x
    tl.store(y_ptr + token * h + col, total.to(y_ptr.dtype.element_ty), mask=col < h)


@triton.jit
def _weights_gradient_kernel(
    x_ptr, dy_ptr, places_ptr, dw_ptr, stride, stride_dy, copies, h, BLOCK: tl.constexpr
):
    copy = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + copy)
    token = copy // copies
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, h, BLOCK):
        col = start + tl.arange(0, BLOCK)
        kept = (col < h) & (place >= 0)
        x = tl.load(x_ptr + place * stride + col, mask=kept, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + token * stride_dy + col, mask=kept, other=0.0).to(tl.float32)
        total += x * dy
    tl.store(dw_ptr + copy, tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty))


def _block(x: Tensor, h: int) -> tuple[int, int]:
    """Columns and warps of a program."""
    most, warps = tuned("moe_permute", x.device, "block", "warps")
    return min(most, max(16, triton.next_power_of_2(h))), warps


def _spread(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor) -> Tensor:
    y = _spread_fake(x, weights, order, places)
    if y.numel():
        flat, (tokens, copies), h = rows(x), places.shape, x.shape[1]
        block, warps = _block(x, h)
        with on_device(x):
            _spread_kernel[(tokens, triton.cdiv(h, block))](
                flat, flat if weights is None else weights.contiguous(), places.contiguous(), y,
                flat.stride(0), copies, h, WEIGHTS=weights is not None, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
    return y


def _spread_fake(x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


def _combine(x: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    y = _combine_fake(x, weights, places)
    if y.numel():
        flat, (tokens, copies), h = rows(x), places.shape, x.shape[1]
        block, warps = _block(x, h)
        with on_device(x):
            _combine_kernel[(tokens, triton.cdiv(h, block))](
                flat, flat if weights is None else weights.contiguous(), places.contiguous(), y,
                flat.stride(0), copies, h, WEIGHTS=weights is not None, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
    return y


def _combine_fake(x: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    return x.new_empty(places.shape[0], x.shape[1])


def _weight_grad(x: Tensor, dy: Tensor, places: Tensor, like: Tensor) -> Tensor:
    dw = _weight_grad_fake(x, dy, places, like)
    if dw.numel():
        flat, dflat, h = rows(x), rows(dy), x.shape[1]
        block, warps = _block(x, h)
        with on_device(x):
            _weights_gradient_kernel[(places.numel(),)](
                flat, dflat, places.contiguous(), dw, flat.stride(0), dflat.stride(0),
                places.shape[1], h, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return dw


def _weight_grad_fake(x: Tensor, dy: Tensor, places: Tensor, like: Tensor) -> Tensor:
    return like.new_empty(places.shape)


_LIBRARY = OpLibrary()
_moe_spread = _LIBRARY.define(
    "moe_spread(Tensor x, Tensor? weights, Tensor order, Tensor places) -> Tensor",
    _spread,
    fake=_spread_fake,
)
_moe_combine = _LIBRARY.define(
    "moe_combine(Tensor x, Tensor? weights, Tensor places) -> Tensor",
    _combine,
    fake=_combine_fake,
)
_moe_weight_grad = _LIBRARY.define(
    "moe_weight_grad(Tensor x, Tensor dy, Tensor places, Tensor like) -> Tensor",
    _weight_grad,
    fake=_weight_grad_fake,
)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _moe_spread(x, None, order, places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return _moe_combine(grads[0], None, places), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor | None, order: Tensor, places: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weights, order, places)
        return _moe_combine(x, weights, places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, order, places = ctx.saved_tensors
        dx = _moe_spread(grads[0], weights, order, places)
        dw = None if weights is None else _moe_weight_grad(x, grads[0], places, weights)
        return dx, dw, None, None


class TritonPermute(ReferencePermute):
    """`mcore_kernels.protocols.MoePermuteOp`; float64 is served by the reference."""

    def permute(self, x: Tensor, assignment: Assignment) -> Tensor:
        """See `MoePermuteOp`."""
        if x.dtype == torch.float64:
            return super().permute(x, assignment)
        return _Permute.apply(x, assignment.order, assignment.places)

    def unpermute(self, rows: Tensor, weights: Tensor | None, assignment: Assignment) -> Tensor:
        """See `MoePermuteOp`."""
        if rows.dtype == torch.float64:
            return super().unpermute(rows, weights, assignment)
        return _Unpermute.apply(rows, weights, assignment.order, assignment.places)


PERMUTE = TritonPermute()
"""The operator; it holds no state."""

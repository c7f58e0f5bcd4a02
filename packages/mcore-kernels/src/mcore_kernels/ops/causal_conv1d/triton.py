"""The causal convolution in Triton. Imported only when it is chosen, because it imports triton.

One kernel each way; only the arguments are kept for the backward. What stands before the silu is
computed again there, for each of the rows that a gradient comes from.

Shapes: T tokens, C channels, W taps. A program takes ROWS × COLUMNS of them.
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
from mcore_kernels.ops.causal_conv1d.reference import check, document_of, last_rows
from mcore_kernels.tuning import tuned


@triton.jit
def _before_silu(
    x_ptr,
    w_ptr,
    b_ptr,
    row,
    start,
    at_col,
    col,
    known,
    stride,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Bias and taps for the tile of `row` [ROWS, 1], whose documents begin at `start`."""
    total = tl.zeros(row.shape, dtype=tl.float32) + tl.zeros(col.shape, dtype=tl.float32)
    if BIAS:
        total += tl.load(b_ptr + col, mask=at_col, other=0.0).to(tl.float32)
    for k in tl.static_range(WIDTH):
        source = row - (WIDTH - 1 - k)
        x = tl.load(x_ptr + source * stride + col, mask=known & (source >= start), other=0.0)
        tap = tl.load(w_ptr + col * WIDTH + k, mask=at_col, other=0.0).to(tl.float32)
        # A product that is left out rather than one by 0: what is not the document's may be NaN.
        total += x.to(tl.float32) * tap
    return total


@triton.jit
def _forward_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    start_ptr,
    y_ptr,
    stride,
    t,
    c,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at_col = col < c
    start = tl.load(start_ptr + row, mask=row < t, other=-1)
    known = (start >= 0) & at_col
    y = _before_silu(x_ptr, w_ptr, b_ptr, row, start, at_col, col, known, stride, BIAS, WIDTH)
    if SILU:
        y = y * tl.sigmoid(y)
    y = tl.where(known, y, 0.0)
    tl.store(y_ptr + row * c + col, y.to(y_ptr.dtype.element_ty), mask=(row < t) & at_col)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    start_ptr,
    dx_ptr,
    dw_ptr,
    stride_dy,
    stride,
    t,
    c,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    at_col = col < c
    own = tl.load(start_ptr + row, mask=row < t, other=-1)
    dx = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        # What the result j rows on says about this row: it has to be of the same document.
        then = row + j
        start = tl.load(start_ptr + then, mask=then < t, other=-1)
        known = (start >= 0) & (start == own) & at_col
        g = tl.load(dy_ptr + then * stride_dy + col, mask=known, other=0.0).to(tl.float32)
        if SILU:
            y = _before_silu(
                x_ptr, w_ptr, b_ptr, then, start, at_col, col, known, stride, BIAS, WIDTH
            )
            s = tl.sigmoid(y)
            g *= s * (1.0 + y * (1.0 - s))
        dx += g * tl.load(w_ptr + col * WIDTH + (WIDTH - 1 - j), mask=at_col, other=0.0).to(
            tl.float32
        )
        if j == 0:
            base = tl.program_id(0).to(tl.int64) * (WIDTH + 1) * c
            for k in tl.static_range(WIDTH):
                source = row - (WIDTH - 1 - k)
                x = tl.load(
                    x_ptr + source * stride + col, mask=known & (source >= start), other=0.0
                ).to(tl.float32)
                part = tl.sum(g * x, axis=0)[None, :]
                tl.store(dw_ptr + base + k * c + col, part, mask=at_col)
            part = tl.sum(g, axis=0)[None, :]
            tl.store(dw_ptr + base + WIDTH * c + col, part, mask=at_col)
    tl.store(dx_ptr + row * c + col, dx.to(dx_ptr.dtype.element_ty), mask=(row < t) & at_col)


def _tile(kernel: str, x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and the tile and warps of a program."""
    most_rows, columns, warps = tuned(kernel, x.device, "rows", "columns", "warps")
    columns = min(columns, max(16, triton.next_power_of_2(x.shape[1])))
    grid = triton.cdiv(x.shape[0], most_rows), triton.cdiv(x.shape[1], columns)
    return grid, {"ROWS": most_rows, "COLUMNS": columns, "num_warps": warps}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool) -> Tensor:
    y = _forward_fake(x, weight, bias, starts, silu)
    if y.numel():
        flat, weight = rows(x), weight.contiguous()
        grid, tile = _tile("causal_conv1d", flat)
        with on_device(x):
            _forward_kernel[grid](
                flat, weight, weight if bias is None else bias.contiguous(), starts, y,
                flat.stride(0), *flat.shape, SILU=silu, BIAS=bias is not None,
                WIDTH=weight.shape[1], **tile,
            )  # fmt: skip
    return y


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _backward_fake(dy, x, weight, bias, starts, silu)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    flat, dflat, weight = rows(x), rows(dy), weight.contiguous()
    grid, tile = _tile("causal_conv1d_backward", flat)
    width = weight.shape[1]
    parts = flat.new_empty(grid[0], width + 1, flat.shape[1], dtype=torch.float32)
    with on_device(x):
        _backward_kernel[grid](
            dflat, flat, weight, weight if bias is None else bias.contiguous(), starts, dx, parts,
            dflat.stride(0), flat.stride(0), *flat.shape, SILU=silu, BIAS=bias is not None,
            WIDTH=width, **tile,
        )  # fmt: skip
    sums = parts.sum(0)
    return dx, sums[:width].t().to(weight.dtype), sums[width].to(db.dtype)


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    db = weight.new_empty(x.shape[1]) if bias is None else bias.new_empty(x.shape[1])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), db


_LIBRARY = OpLibrary()
_conv = _LIBRARY.define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor starts, bool silu) -> Tensor",
    _forward,
    fake=_forward_fake,
)
_conv_backward = _LIBRARY.define(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor starts, "
    "bool silu) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.silu = inputs[4]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, starts = ctx.saved_tensors
    dx, dw, db = _conv_backward(dy, x, weight, bias, starts, ctx.silu)
    return dx, dw, None if bias is None else db, None, None


_LIBRARY.differentiate("causal_conv1d", _gradients, keep=_keep)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    uniform: tuple[int, int] | None = None,
    initial_states: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.CausalConv1dOp`; ValueError for shapes that do not fit."""
    count = cu_seqlens.shape[0] - 1
    check(x, weight, bias, count, uniform, initial_states)
    assert initial_states is None, "from states the reference is called"
    bounds = cu_seqlens.long()
    document = document_of(x, bounds, uniform)
    padded = torch.cat((bounds[:-1], bounds.new_full((1,), -1)))
    y = _conv(x, weight, bias, padded[document], silu)
    return y, last_rows(x, bounds, weight.shape[1] - 1)

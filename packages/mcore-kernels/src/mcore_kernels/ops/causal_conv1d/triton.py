"""The causal convolution in Triton. Imported only when it is chosen, because it imports triton.

A program walks down ROWS rows of COLUMNS channels and holds the last W-1 of them in registers, so
that each number is read once. The backward does so too: what stands before the silu is computed
again, and gradients of the W-1 rows behind are held until they are complete. Sums over rows, for
weight and bias, are written for each program and added up afterwards, in a fixed order.

Shapes: T tokens, N documents, C channels, W taps. STEP rows are asked for at a time.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,assignment,misc"
# ruff: noqa: PLR0917, RUF005 -- kernels take pointers by position; Triton joins tuples by "+"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, on_device, rows
from mcore_kernels.ops.causal_conv1d.reference import check
from mcore_kernels.tuning import tuned


@triton.jit
def _starts_kernel(ends_ptr, start_ptr, t, count, halvings, BLOCK: tl.constexpr):
    # The first row of each row's document, by bisection; -1 for rows of none.
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), dtype=tl.int32)
    high = low + count
    for _ in range(halvings):
        middle = (low + high) // 2
        end = tl.load(ends_ptr + 1 + middle, mask=low < high, other=0)
        behind = (low < high) & (end <= row)
        low = tl.where(behind, middle + 1, low)
        high = tl.where(behind, high, middle)
    start = tl.load(ends_ptr + low, mask=low < count, other=-1)
    tl.store(start_ptr + row, start.to(tl.int32), mask=row < t)


@triton.jit
def _last_kernel(
    x_ptr,
    ends_ptr,
    state_ptr,
    stride,
    c,
    PAST: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The last rows of a document to its states; or their gradient back to the rows.
    document = tl.program_id(0) // PAST
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends_ptr + document).to(tl.int64)
    row = tl.load(ends_ptr + document + 1).to(tl.int64) - PAST + tl.program_id(0) % PAST
    at_x = x_ptr + row * stride + col
    at_state = state_ptr + tl.program_id(0).to(tl.int64) * c + col
    known = (row >= start) & (col < c)
    if BACK:
        tl.store(at_x, tl.load(at_state, mask=known), mask=known)
    else:
        tl.store(at_state, tl.load(at_x, mask=known, other=0.0), mask=col < c)


@triton.jit
def _taps(w_ptr, col, at_col, WIDTH: tl.constexpr):
    taps = ()
    for k in tl.static_range(WIDTH):
        w = tl.load(w_ptr + col * WIDTH + k, mask=at_col, other=0.0)
        taps = taps + (w.to(tl.float32),)
    return taps


@triton.jit
def _row(x_ptr, row, t, stride, col, at_col):
    return tl.load(x_ptr + row * stride + col, mask=at_col & (row >= 0) & (row < t), other=0.0)


@triton.jit
def _rows_before(x_ptr, first, t, stride, col, at_col, WIDTH: tl.constexpr):
    """The WIDTH - 1 rows before the first, oldest first."""
    held = ()
    for k in tl.static_range(WIDTH - 1):
        x = _row(x_ptr, first - (WIDTH - 1 - k), t, stride, col, at_col)
        held = held + (x.to(tl.float32),)
    return held


@triton.jit
def _rows_ahead(x_ptr, first, t, stride, col, at_col, STEP: tl.constexpr):
    ahead = ()
    for u in tl.static_range(STEP):
        ahead = ahead + (_row(x_ptr, first + u, t, stride, col, at_col),)
    return ahead


@triton.jit
def _own(window, row, start, WIDTH: tl.constexpr):
    """The window's rows, but zeros for those before the document: they may hold NaN."""
    own = ()
    for k in tl.static_range(WIDTH):
        own = own + (tl.where(row - (WIDTH - 1 - k) >= start, window[k], 0.0),)
    return own


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
    STEP: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at_col = col < c
    taps = _taps(w_ptr, col, at_col, WIDTH)
    bias = tl.zeros((COLUMNS,), dtype=tl.float32)
    if BIAS:
        bias += tl.load(b_ptr + col, mask=at_col, other=0.0).to(tl.float32)
    held = _rows_before(x_ptr, first, t, stride, col, at_col, WIDTH)
    for base in range(first, tl.minimum(first + ROWS, t), STEP):
        ahead = _rows_ahead(x_ptr, base, t, stride, col, at_col, STEP)
        for u in tl.static_range(STEP):
            row = base + u
            start = tl.load(start_ptr + row, mask=row < t, other=-1)
            window = held + (ahead[u].to(tl.float32),)
            own = _own(window, row, start, WIDTH)
            y = bias
            for k in tl.static_range(WIDTH):
                y += own[k] * taps[k]
            if SILU:
                y = y * tl.sigmoid(y)
            y = tl.where(start >= 0, y, 0.0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * c + col, y, mask=at_col & (row < t))
            held = window[1:]


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    b_ptr,
    start_ptr,
    dx_ptr,
    sums_ptr,
    stride_dy,
    stride,
    t,
    c,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    stop = tl.minimum(first + ROWS, t)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at_col = col < c
    taps = _taps(w_ptr, col, at_col, WIDTH)
    nothing = tl.zeros((COLUMNS,), dtype=tl.float32)
    bias = nothing
    if BIAS:
        bias += tl.load(b_ptr + col, mask=at_col, other=0.0).to(tl.float32)
    db = nothing
    dw = ()
    for _ in tl.static_range(WIDTH):
        dw = dw + (nothing,)
    open_dx = ()  # of the rows behind, oldest first
    for _ in tl.static_range(WIDTH - 1):
        open_dx = open_dx + (nothing,)
    held = _rows_before(x_ptr, first, t, stride, col, at_col, WIDTH)
    for base in range(first, stop + WIDTH - 1, STEP):
        ahead = _rows_ahead(x_ptr, base, t, stride, col, at_col, STEP)
        ahead_dy = _rows_ahead(dy_ptr, base, t, stride_dy, col, at_col, STEP)
        for u in tl.static_range(STEP):
            row = base + u
            start = tl.load(start_ptr + row, mask=row < t, other=-1)
            known = start >= 0
            window = held + (ahead[u].to(tl.float32),)
            own = _own(window, row, start, WIDTH)
            g = tl.where(known, ahead_dy[u].to(tl.float32), 0.0)
            if SILU:
                y = bias
                for k in tl.static_range(WIDTH):
                    y += own[k] * taps[k]
                s = tl.sigmoid(y)
                g = tl.where(known, g * s * (1.0 + y * (1.0 - s)), 0.0)
            # Rows past the last are there for the gradients of those before alone.
            counted = tl.where(row < stop, g, 0.0)
            db += counted
            sums = ()
            grads = ()
            opened = open_dx + (nothing,)
            for k in tl.static_range(WIDTH):
                seen = known & (row - (WIDTH - 1 - k) >= start)
                sums = sums + (dw[k] + tl.where(row < stop, counted * own[k], 0.0),)
                grads = grads + (opened[k] + tl.where(seen, g * taps[k], 0.0),)
            dw = sums
            done = row - (WIDTH - 1)
            tl.store(
                dx_ptr + done * c + col,
                grads[0].to(dx_ptr.dtype.element_ty),
                mask=at_col & (done >= first) & (done < stop),
            )
            open_dx = grads[1:]
            held = window[1:]
    at = sums_ptr + tl.program_id(0).to(tl.int64) * (WIDTH + 1) * c + col
    for k in tl.static_range(WIDTH):
        tl.store(at + k * c, dw[k], mask=at_col)
    tl.store(at + WIDTH * c, db, mask=at_col)


def _tile(kernel: str, x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and the tile and warps of a program."""
    names = ("rows", "columns", "step", "warps")
    most_rows, columns, step, warps = tuned(kernel, x.device, *names)
    columns = min(columns, max(16, triton.next_power_of_2(x.shape[1])))
    grid = triton.cdiv(x.shape[0], most_rows), triton.cdiv(x.shape[1], columns)
    return grid, {"ROWS": most_rows, "COLUMNS": columns, "STEP": step, "num_warps": warps}


def _starts(ends: Tensor, count: int) -> Tensor:
    """The first row of the document of each of `count` rows; -1 for rows of none."""
    start = torch.empty(count, dtype=torch.int32, device=ends.device)
    documents, block = ends.shape[0] - 1, 1024
    _starts_kernel[(triton.cdiv(count, block),)](
        ends, start, count, documents, documents.bit_length(), BLOCK=block
    )
    return start


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, silu: bool) -> Tensor:
    y = _forward_fake(x, weight, bias, ends, silu)
    if y.numel():
        flat, weight = rows(x), weight.contiguous()
        grid, tile = _tile("causal_conv1d", flat)
        with on_device(x):
            _forward_kernel[grid](
                flat, weight, weight if bias is None else bias.contiguous(),
                _starts(ends, flat.shape[0]), y, flat.stride(0), *flat.shape, SILU=silu,
                BIAS=bias is not None, WIDTH=weight.shape[1], **tile,
            )  # fmt: skip
    return y


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, silu: bool
) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _backward_fake(dy, x, weight, bias, ends, silu)
    if not x.numel():
        return dx, dw.zero_(), db.zero_()
    flat, dflat, weight = rows(x), rows(dy), weight.contiguous()
    grid, tile = _tile("causal_conv1d_backward", flat)
    width = weight.shape[1]
    parts = flat.new_empty(grid[0], width + 1, flat.shape[1], dtype=torch.float32)
    with on_device(x):
        _backward_kernel[grid](
            dflat, flat, weight, weight if bias is None else bias.contiguous(),
            _starts(ends, flat.shape[0]), dx, parts, dflat.stride(0), flat.stride(0), *flat.shape,
            SILU=silu, BIAS=bias is not None, WIDTH=width, **tile,
        )  # fmt: skip
    sums = parts.sum(0)
    return dx, sums[:width].t().to(weight.dtype), sums[width].to(db.dtype)


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    db = weight.new_empty(x.shape[1]) if bias is None else bias.new_empty(x.shape[1])
    return x.new_empty(x.shape), weight.new_empty(weight.shape), db


def _last(x: Tensor, ends: Tensor, past: int) -> Tensor:
    states = _last_fake(x, ends, past)
    if states.numel():
        _move_last(rows(x), ends, states, past, back=False)
    return states


def _last_fake(x: Tensor, ends: Tensor, past: int) -> Tensor:
    return x.new_empty(ends.shape[0] - 1, past, x.shape[1])


def _last_backward(states: Tensor, ends: Tensor, count: int) -> Tensor:
    dx = states.new_zeros(count, states.shape[2])
    if states.numel():
        _move_last(dx, ends, states.contiguous(), states.shape[1], back=True)
    return dx


def _last_backward_fake(states: Tensor, ends: Tensor, count: int) -> Tensor:
    return states.new_empty(count, states.shape[2])


def _move_last(x: Tensor, ends: Tensor, states: Tensor, past: int, *, back: bool) -> None:
    block = 1024
    grid = (states.shape[0] * past, triton.cdiv(x.shape[1], block))
    with on_device(x):
        _last_kernel[grid](
            x, ends, states, x.stride(0), x.shape[1], PAST=past, BACK=back, BLOCK=block
        )


_LIBRARY = OpLibrary()
_conv = _LIBRARY.define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor ends, bool silu) -> Tensor",
    _forward,
    fake=_forward_fake,
)
_conv_backward = _LIBRARY.define(
    "causal_conv1d_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor ends, "
    "bool silu) -> (Tensor, Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)
_last_rows = _LIBRARY.define(
    "causal_conv1d_last(Tensor x, Tensor ends, int past) -> Tensor", _last, fake=_last_fake
)
_last_rows_backward = _LIBRARY.define(
    "causal_conv1d_last_backward(Tensor states, Tensor ends, int count) -> Tensor",
    _last_backward,
    fake=_last_backward_fake,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.silu = inputs[4]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, ends = ctx.saved_tensors
    dx, dw, db = _conv_backward(dy, x, weight, bias, ends, ctx.silu)
    return dx, dw, None if bias is None else db, None, None


_LIBRARY.differentiate("causal_conv1d", _gradients, keep=_keep)


def _keep_last(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.count = inputs[0].shape[0]


def _gradients_last(ctx: Any, dstates: Tensor) -> tuple[Tensor | None, ...]:
    (ends,) = ctx.saved_tensors
    return _last_rows_backward(dstates, ends, ctx.count), None, None


_LIBRARY.differentiate("causal_conv1d_last", _gradients_last, keep=_keep_last)


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
    check(x, weight, bias, cu_seqlens.shape[0] - 1, uniform, initial_states)
    assert initial_states is None, "from states the reference is called"
    ends = cu_seqlens.contiguous()
    return _conv(x, weight, bias, ends, silu), _last_rows(x, ends, weight.shape[1] - 1)

"""Kernels of the state-space scan, in Triton. Imported only by `triton.py` beside it.

In a chunk, with Δ the step sizes, t their sums times -exp(a_log) from the chunk's beginning on, H
the state before it and G the gradient of the state behind it:

    y[l]  = exp(t[l]) H c[l] + Σ_{m≤l} (c[l]·b[m]) exp(t[l]-t[m]) Δ[m] x[m] + d x[l]
    H'    = exp(t[L]) H + Σ_m exp(t[L]-t[m]) Δ[m] x[m] ⊗ b[m]
    G'    = exp(t[L]) G + Σ_l exp(t[l]) dy[l] ⊗ c[l]           (from the last chunk to the first)

Shapes: T tokens, h heads of size P, G groups, S state size; chunks of L rows. What is indexed by
head and row, [h, T], has the rows of a head side by side.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import triton
import triton.language as tl

from mcore_kernels.ops.chunks_triton import (
    between,
    chunk_rows,
    keep_sums,
    keep_tile,
    product,
    sums,
    tile,
    tile_across,
)


@triton.jit
def totals_kernel(
    step_ptr,
    a_ptr,
    step_out_ptr,
    total_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Step sizes [T, h] to [h, T], and the sums of logarithms of what is kept."""
    _, first, stop = chunk_rows(tl.program_id(0), ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (row < stop)[:, None] & (head < heads)[None, :]
    step = tile(step_ptr + first * heads, i, heads, row < stop, head, head < heads)
    a = -tl.exp(tl.load(a_ptr + head, mask=head < heads, other=0.0).to(tl.float32))
    total = tl.cumsum(step.to(tl.float64) * a.to(tl.float64)[None, :], axis=0)
    at = head.to(tl.int64)[None, :] * t + row[:, None]
    tl.store(step_out_ptr + at, step, mask=mask)
    keep_sums(total_ptr, tl.cast(heads, tl.int64) * t, at, total, mask, PAIR)


@triton.jit
def carry_kernel(
    x_ptr,
    b_ptr,
    step_ptr,
    total_ptr,
    initial_ptr,
    at_chunks_ptr,
    final_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    heads,
    share,
    p_size,
    s_size,
    stride_xt,
    stride_xh,
    stride_bt,
    stride_bg,
    INITIAL: tl.constexpr,
    BACK: tl.constexpr,
    LENGTH: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """States before each chunk of a document, and behind its last.

    BACK: their gradients behind each chunk, and before the first; x is then dy, and b is c.
    """
    document = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    tiles = tl.cdiv(s_size, S)
    p = tl.program_id(1) // tiles * P + tl.arange(0, P)
    s = tl.program_id(1) % tiles * S + tl.arange(0, S)
    at_p, at_s = p < p_size, s < s_size
    of_state = tl.cast(p_size, tl.int64) * s_size
    at_document = tl.program_id(0) * of_state
    state = tl.zeros((P, S), dtype=tl.float32)
    if INITIAL:
        state += tile(initial_ptr + at_document, p, s_size, at_p, s, at_s).to(tl.float32)
    start = tl.load(ends_ptr + document).to(tl.int64)
    end = tl.load(ends_ptr + document + 1).to(tl.int64)
    chunk = tl.load(chunks_ptr + document)
    number = tl.load(chunks_ptr + document + 1) - chunk
    size = tl.cast(heads, tl.int64) * t
    i = tl.arange(0, LENGTH)
    for turn in range(number):
        nth = turn
        if BACK:
            nth = number - 1 - turn
        first = start + nth * LENGTH
        stop = tl.minimum(first + LENGTH, end)
        at_chunk = at_chunks_ptr + ((chunk + nth) * heads + head) * of_state
        keep_tile(at_chunk, p, s_size, at_p, s, at_s, state)
        row = first + i
        live = row < stop
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), True, PAIR)
        last, last_rest = sums(total_ptr, size, head * t + stop - 1, True, PAIR)
        if BACK:
            factor = tl.exp(total)
        else:
            step = tl.load(step_ptr + head * t + row, mask=live, other=0.0)
            factor = between(last, last_rest, total, rest, PAIR) * step
        x = tile_across(x_ptr + head * stride_xh + first * stride_xt, i, stride_xt, live, p, at_p)
        b = tile(b_ptr + head // share * stride_bg + first * stride_bt, i, stride_bt, live, s, at_s)
        taken = (x.to(tl.float32) * factor[None, :]).to(b.dtype)
        state = product(taken, b, state * tl.exp(last), PRECISION, WIDEN)
    keep_tile(final_ptr + at_document, p, s_size, at_p, s, at_s, state)


@triton.jit
def outputs_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    step_ptr,
    total_ptr,
    before_ptr,
    y_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    share,
    p_size,
    s_size,
    stride_xt,
    stride_xh,
    stride_bt,
    stride_bg,
    stride_ct,
    stride_cg,
    SKIP: tl.constexpr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y of a chunk for up to HEADS heads of one group, which share the products of b and c."""
    chunk = tl.program_id(0)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    blocks = tl.cdiv(share, HEADS)
    group = (tl.program_id(1) // blocks).to(tl.int64)
    begin = tl.program_id(1) % blocks * HEADS
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    p, s = tl.arange(0, P), tl.arange(0, S)
    at_p, at_s = p < p_size, s < s_size
    c = tile(c_ptr + group * stride_cg + first * stride_ct, i, stride_ct, live, s, at_s)
    b = tile_across(b_ptr + group * stride_bg + first * stride_bt, i, stride_bt, live, s, at_s)
    scores = product(c, b, tl.zeros((LENGTH, LENGTH), dtype=tl.float32), PRECISION, WIDEN)
    earlier = i[:, None] >= i[None, :]
    size = tl.cast(heads, tl.int64) * t
    for head in range(group * share + begin, group * share + tl.minimum(begin + HEADS, share)):
        at = head * t + row
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
        step = tl.load(step_ptr + at, mask=live, other=0.0)
        decay = between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
        shares = tl.where(earlier, scores * decay, 0.0) * step[None, :]
        at_state = before_ptr + (chunk * heads + head) * p_size * s_size
        state = tile_across(at_state, p, s_size, at_p & of_document, s, at_s)
        x = tile(x_ptr + head * stride_xh + first * stride_xt, i, stride_xt, live, p, at_p)
        y = product(c, state, tl.zeros((LENGTH, P), dtype=tl.float32), PRECISION, WIDEN)
        y = product(shares.to(x.dtype), x, y * tl.exp(total)[:, None], PRECISION, WIDEN)
        if SKIP:
            y += tl.load(d_ptr + head).to(tl.float32) * x.to(tl.float32)
        keep_tile(
            y_ptr + (first * heads + head) * p_size, i, heads * p_size, row < stop, p, at_p, y
        )


@triton.jit
def input_gradients_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    step_ptr,
    total_ptr,
    behind_ptr,
    dx_ptr,
    dstep_ptr,
    written_ptr,
    dd_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    share,
    p_size,
    s_size,
    stride_dyt,
    stride_dyh,
    stride_xt,
    stride_xh,
    stride_bt,
    stride_bg,
    stride_ct,
    stride_cg,
    SKIP: tl.constexpr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Gradients of x, of step sizes as factors of x, and of d, summed over the chunk's rows.

    And what each row's part of the state behind the chunk is worth, [h, T].
    Matrices of rows by rows are [m, l]: what row l gets of m.
    """
    chunk = tl.program_id(0)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    blocks = tl.cdiv(share, HEADS)
    group = (tl.program_id(1) // blocks).to(tl.int64)
    begin = tl.program_id(1) % blocks * HEADS
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    p, s = tl.arange(0, P), tl.arange(0, S)
    at_p, at_s = p < p_size, s < s_size
    b = tile(b_ptr + group * stride_bg + first * stride_bt, i, stride_bt, live, s, at_s)
    c = tile_across(c_ptr + group * stride_cg + first * stride_ct, i, stride_ct, live, s, at_s)
    scores = product(b, c, tl.zeros((LENGTH, LENGTH), dtype=tl.float32), PRECISION, WIDEN)
    later = i[None, :] >= i[:, None]
    size = tl.cast(heads, tl.int64) * t
    for head in range(group * share + begin, group * share + tl.minimum(begin + HEADS, share)):
        at = head * t + row
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
        last, last_rest = sums(total_ptr, size, head * t + stop - 1, of_document, PAIR)
        step = tl.load(step_ptr + at, mask=live, other=0.0)
        decay = between(total[None, :], rest[None, :], total[:, None], rest[:, None], PAIR)
        shares = tl.where(later, scores * decay, 0.0)
        left = tl.where(live, between(last, last_rest, total, rest, PAIR), 0.0)
        at_state = behind_ptr + (chunk * heads + head) * p_size * s_size
        behind = tile_across(at_state, p, s_size, at_p & of_document, s, at_s)
        dy = tile(dy_ptr + head * stride_dyh + first * stride_dyt, i, stride_dyt, live, p, at_p)
        taken = product(b, behind, tl.zeros((LENGTH, P), dtype=tl.float32), PRECISION, WIDEN)
        taken *= left[:, None]
        # Read twice: between, registers are short.
        at_x = x_ptr + head * stride_xh + first * stride_xt
        x = tile(at_x, i, stride_xt, live, p, at_p).to(tl.float32)
        tl.store(written_ptr + at, tl.sum(x * taken, axis=1) * step, mask=row < stop)
        taken = product(shares.to(dy.dtype), dy, taken, PRECISION, WIDEN)
        x, dy = tile(at_x, i, stride_xt, live, p, at_p).to(tl.float32), dy.to(tl.float32)
        dx = taken * step[:, None]
        if SKIP:
            dx += tl.load(d_ptr + head).to(tl.float32) * dy
        keep_tile(
            dx_ptr + (first * heads + head) * p_size, i, heads * p_size, row < stop, p, at_p, dx
        )
        tl.store(dstep_ptr + at, tl.sum(x * taken, axis=1), mask=row < stop)
        tl.store(dd_ptr + chunk * heads + head, tl.sum(tl.sum(x * dy, axis=1), axis=0))


@triton.jit
def state_gradients_kernel(
    dy_ptr,
    x_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    step_ptr,
    total_ptr,
    before_ptr,
    behind_ptr,
    written_ptr,
    dstep_ptr,
    grad_ptr,
    da_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    share,
    p_size,
    s_size,
    stride_dyt,
    stride_dyh,
    stride_xt,
    stride_xh,
    stride_bt,
    stride_bg,
    stride_ct,
    stride_cg,
    OF_B: tl.constexpr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The gradient of b, or of c, summed over the program's heads.

    And of a_log, summed over the chunk's rows, through what the gradient is made of; what step
    sizes do to the decay there is added to their gradient. One of the two at a time, because both
    are more than a processor's registers.
    """
    chunk = tl.program_id(0)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    blocks = tl.cdiv(share, HEADS)
    groups = tl.num_programs(1) // blocks
    group = (tl.program_id(1) // blocks).to(tl.int64)
    block = tl.program_id(1) % blocks
    begin = block * HEADS
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    p, s = tl.arange(0, P), tl.arange(0, S)
    at_p, at_s = p < p_size, s < s_size
    b = tile(b_ptr + group * stride_bg + first * stride_bt, i, stride_bt, live, s, at_s)
    c = tile(c_ptr + group * stride_cg + first * stride_ct, i, stride_ct, live, s, at_s)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    nothing = tl.zeros((LENGTH, S), dtype=tl.float32)
    grad = nothing
    scores = square
    if not OF_B:
        scores = product(b, tl.trans(c), square, PRECISION, WIDEN)
    size = tl.cast(heads, tl.int64) * t
    for head in range(group * share + begin, group * share + tl.minimum(begin + HEADS, share)):
        at = head * t + row
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
        step = tl.load(step_ptr + at, mask=live, other=0.0)
        x = tile(x_ptr + head * stride_xh + first * stride_xt, i, stride_xt, live, p, at_p)
        dy = tile(dy_ptr + head * stride_dyh + first * stride_dyt, i, stride_dyt, live, p, at_p)
        at_state = (chunk * heads + head) * p_size * s_size
        before = tile(before_ptr + at_state, p, s_size, at_p & of_document, s, at_s)
        decay = between(total[None, :], rest[None, :], total[:, None], rest[:, None], PAIR)
        decay = tl.where(i[None, :] >= i[:, None], decay * step[:, None], 0.0)
        pairs = product(x, tl.trans(dy), square, PRECISION, WIDEN) * decay
        narrow = pairs.to(b.dtype)
        if OF_B:
            behind = tile(behind_ptr + at_state, p, s_size, at_p & of_document, s, at_s)
            both = tl.sum(tl.sum(before.to(tl.float32) * behind.to(tl.float32), axis=1), axis=0)
            last, last_rest = sums(total_ptr, size, head * t + stop - 1, of_document, PAIR)
            left = tl.where(live, between(last, last_rest, total, rest, PAIR), 0.0) * step
            of_state = product(x, behind, nothing, PRECISION, WIDEN) * left[:, None]
            written = tl.load(written_ptr + at, mask=live, other=0.0)
            at_last = tl.sum(written, axis=0) + tl.exp(last) * both
            dtotal = tl.where(row == stop - 1, at_last, 0.0) - written
            grad = product(narrow, c, grad + of_state, PRECISION, WIDEN)
        else:
            # A row's pair with itself says nothing of what is kept between them.
            pairs = tl.where(i[None, :] > i[:, None], pairs * scores, 0.0)
            of_state = product(dy, before, nothing, PRECISION, WIDEN) * tl.exp(total)[:, None]
            dtotal = tl.sum(pairs, axis=0) - tl.sum(pairs, axis=1)
            dtotal += tl.sum(of_state * c.to(tl.float32), axis=1)
            grad = product(tl.trans(narrow), b, grad + of_state, PRECISION, WIDEN)
        da = tl.cumsum(tl.where(live, dtotal, 0.0), axis=0, reverse=True)
        a = -tl.exp(tl.load(a_ptr + head).to(tl.float32))
        dstep = tl.load(dstep_ptr + at, mask=row < stop, other=0.0)
        tl.store(dstep_ptr + at, dstep + a * da, mask=row < stop)
        tl.store(da_ptr + chunk * heads + head, a * tl.sum(da * step, axis=0))
    to = ((block * t + first) * groups + group) * s_size
    keep_tile(grad_ptr + to, i, groups * s_size, row < stop, s, at_s, grad)

"""Kernels of the gated delta rule, in Triton. Imported only by `triton.py` beside it.

In a chunk, with t the sums of g from its beginning on and S the state before it:

    A[i,j] = β[i] (k[i]·k[j]) exp(t[i]-t[j])          for j < i, else 0
    (I + A) U = β v        (I + A) W = β exp(t) k     what is written, and what it corrects
    u  = U - W S
    y  = scale (exp(t) q S + Σ_{j≤i} (q[i]·k[j]) exp(t[i]-t[j]) u[j])
    S' = exp(t[L]) S + Σ_j exp(t[L]-t[j]) k[j] ⊗ u[j]

Shapes: T tokens, K key heads of size D, h heads with values of size Dv; chunks of L rows. What is
indexed by head and row, [h, T], has the rows of a head side by side.
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
    g_ptr,
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
    """Sums of g [T, h] as [h, T]."""
    _, first, stop = chunk_rows(tl.program_id(0), ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    total = tl.cumsum(
        tile(g_ptr + first * heads, i, heads, row < stop, head, head < heads).to(tl.float64), axis=0
    )
    at = head.to(tl.int64)[None, :] * t + row[:, None]
    mask = (row < stop)[:, None] & (head < heads)[None, :]
    keep_sums(total_ptr, tl.cast(heads, tl.int64) * t, at, total, mask, PAIR)


@triton.jit
def solve_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    total_ptr,
    system_ptr,
    inverse_ptr,
    own_ptr,
    seen_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    share,
    d_size,
    v_size,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    KEEP: tl.constexpr,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """U [T, h, Dv] and W [T, h, D] of a chunk and head; KEEP: and the inverse [K, h, L, L]."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    size = tl.cast(heads, tl.int64) * t
    d, e = tl.arange(0, D), tl.arange(0, V)
    at_d, at_e = d < d_size, e < v_size
    k = tile(k_ptr + head // share * stride_kh + first * stride_kt, i, stride_kt, live, d, at_d)
    total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
    beta = tl.load(beta_ptr + row * heads + head, mask=live, other=0.0).to(tl.float32)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    decay = between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    system = product(k, tl.trans(k), square, PRECISION, WIDEN) * decay * beta[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    # Rows of the inverse follow from those before them; a row is taken out of memory, because
    # it cannot be out of registers.
    at = (chunk * heads + head) * LENGTH * LENGTH
    tl.store(system_ptr + at + i[:, None] * LENGTH + i[None, :], system)
    tl.debug_barrier()
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, LENGTH):
        of_row = tl.load(system_ptr + at + r * LENGTH + i)
        new = tl.sum(of_row[:, None] * inverse, axis=0)[None, :]
        inverse -= tl.where(i[:, None] == r, new, 0.0)
    inverse = inverse.to(k.dtype)
    if KEEP:
        tl.store(inverse_ptr + at + i[:, None] * LENGTH + i[None, :], inverse)
    v = tile(v_ptr + head * stride_vh + first * stride_vt, i, stride_vt, live, e, at_e)
    right = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    own = product(inverse, right, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
    keep_tile(
        own_ptr + (first * heads + head) * v_size, i, heads * v_size, row < stop, e, at_e, own
    )
    right = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    seen = product(inverse, right, tl.zeros((LENGTH, D), dtype=tl.float32), PRECISION, WIDEN)
    keep_tile(
        seen_ptr + (first * heads + head) * d_size, i, heads * d_size, row < stop, d, at_d, seen
    )


@triton.jit
def carry_kernel(
    k_ptr,
    total_ptr,
    own_ptr,
    seen_ptr,
    initial_ptr,
    before_ptr,
    final_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    heads,
    share,
    d_size,
    v_size,
    stride_kt,
    stride_kh,
    INITIAL: tl.constexpr,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """States before each chunk of a document and behind its last; U becomes u."""
    document = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.program_id(1) * V + tl.arange(0, V)
    at_d, at_e = d < d_size, e < v_size
    of_state = tl.cast(d_size, tl.int64) * v_size
    at_document = tl.program_id(0) * of_state
    state = tl.zeros((D, V), dtype=tl.float32)
    if INITIAL:
        state += tile(initial_ptr + at_document, d, v_size, at_d, e, at_e).to(tl.float32)
    start = tl.load(ends_ptr + document).to(tl.int64)
    end = tl.load(ends_ptr + document + 1).to(tl.int64)
    chunk = tl.load(chunks_ptr + document)
    size = tl.cast(heads, tl.int64) * t
    i = tl.arange(0, LENGTH)
    for nth in range(tl.load(chunks_ptr + document + 1) - chunk):
        first = start + nth * LENGTH
        stop = tl.minimum(first + LENGTH, end)
        row = first + i
        live = row < stop
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), True, PAIR)
        last, last_rest = sums(total_ptr, size, head * t + stop - 1, True, PAIR)
        seen = tile(seen_ptr + (first * heads + head) * d_size, i, heads * d_size, live, d, at_d)
        k = tile_across(
            k_ptr + head // share * stride_kh + first * stride_kt, i, stride_kt, live, d, at_d
        )
        own = tile(own_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e).to(
            tl.float32
        )
        narrow = state.to(k.dtype)
        at_chunk = before_ptr + ((chunk + nth) * heads + head) * of_state
        keep_tile(at_chunk, d, v_size, at_d, e, at_e, narrow)
        nothing = tl.zeros((LENGTH, V), dtype=tl.float32)
        written = own - product(seen, narrow, nothing, PRECISION, WIDEN)
        keep_tile(
            own_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e, written
        )
        left = between(last, last_rest, total, rest, PAIR)
        written = (written * left[:, None]).to(k.dtype)
        state = product(k, written, state * tl.exp(last), PRECISION, WIDEN)
    keep_tile(final_ptr + at_document, d, v_size, at_d, e, at_e, state)


@triton.jit
def outputs_kernel(
    q_ptr,
    k_ptr,
    total_ptr,
    written_ptr,
    before_ptr,
    y_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    count,
    halvings,
    heads,
    share,
    d_size,
    v_size,
    scale,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y of a chunk and head, V columns of it."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    size = tl.cast(heads, tl.int64) * t
    d = tl.arange(0, D)
    e = tl.program_id(2) * V + tl.arange(0, V)
    at_d, at_e = d < d_size, e < v_size
    q = tile(q_ptr + head // share * stride_qh + first * stride_qt, i, stride_qt, live, d, at_d)
    k = tile_across(
        k_ptr + head // share * stride_kh + first * stride_kt, i, stride_kt, live, d, at_d
    )
    total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    decay = between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    shares = product(q, k, square, PRECISION, WIDEN) * decay
    shares = tl.where(i[:, None] >= i[None, :], shares, 0.0).to(q.dtype)
    at_chunk = before_ptr + (chunk * heads + head) * d_size * v_size
    before = tile(at_chunk, d, v_size, at_d & of_document, e, at_e)
    written = tile(written_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e)
    y = product(q, before, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
    y = product(shares, written, y * tl.exp(total)[:, None], PRECISION, WIDEN) * scale
    keep_tile(y_ptr + (first * heads + head) * v_size, i, heads * v_size, row < stop, e, at_e, y)

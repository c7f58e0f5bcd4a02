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

from mcore_kernels.ops.chunks_triton import chunk_rows, product


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
    """Sums of g [T, h] as [h, T], in float64; PAIR keeps what float32 does not hold of them."""
    _, first, stop = chunk_rows(tl.program_id(0), ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    row = first + tl.arange(0, LENGTH)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (row < stop)[:, None] & (head < heads)[None, :]
    g = tl.load(g_ptr + row[:, None] * heads + head[None, :], mask=mask, other=0.0)
    total = tl.cumsum(g.to(tl.float64), axis=0)
    at = head.to(tl.int64)[None, :] * t + row[:, None]
    short = total.to(tl.float32)
    tl.store(total_ptr + at, short, mask=mask)
    if PAIR:
        rest = (total - short.to(tl.float64)).to(tl.float32)
        tl.store(total_ptr + tl.cast(heads, tl.int64) * t + at, rest, mask=mask)


@triton.jit
def _sums(total_ptr, size, at, live, PAIR: tl.constexpr):
    # Rows behind a chunk's last are read as that one: no later sum is above an earlier one.
    total = tl.load(total_ptr + at, mask=live, other=0.0)
    rest = total
    if PAIR:
        rest = tl.load(total_ptr + size + at, mask=live, other=0.0)
    return total, rest


@triton.jit
def _between(total, rest, since, since_rest, PAIR: tl.constexpr):
    exponent = total - since
    if PAIR:
        exponent += rest - since_rest
    return tl.exp(exponent)


@triton.jit
def solve_kernel(
    k_ptr,
    v_ptr,
    beta_ptr,
    total_ptr,
    system_ptr,
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
    LENGTH: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """U [T, h, Dv] and W [T, h, D] of a chunk and head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    at_row = tl.minimum(row, stop - 1)
    d, e = tl.arange(0, D), tl.arange(0, V)
    at_k = k_ptr + row[:, None] * stride_kt + head // share * stride_kh + d[None, :]
    k = tl.load(at_k, mask=live[:, None] & (d < d_size)[None, :], other=0.0)
    total, rest = _sums(
        total_ptr, tl.cast(heads, tl.int64) * t, head * t + at_row, of_document, PAIR
    )
    beta = tl.load(beta_ptr + row * heads + head, mask=live, other=0.0).to(tl.float32)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    decay = _between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    system = product(k, tl.trans(k), square, PRECISION, WIDEN) * decay * beta[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    # Rows of the inverse follow from those before them; a row is taken out of memory, because
    # it cannot be out of registers.
    at = system_ptr + (chunk * heads + head) * LENGTH * LENGTH
    tl.store(at + i[:, None] * LENGTH + i[None, :], system)
    tl.debug_barrier()
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, LENGTH):
        of_row = tl.load(at + r * LENGTH + i)
        new = tl.sum(of_row[:, None] * inverse, axis=0)[None, :]
        inverse -= tl.where(i[:, None] == r, new, 0.0)
    inverse = inverse.to(k.dtype)
    v = tl.load(
        v_ptr + row[:, None] * stride_vt + head * stride_vh + e[None, :],
        mask=live[:, None] & (e < v_size)[None, :],
        other=0.0,
    )
    right = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    own = product(inverse, right, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
    to = (row[:, None] * heads + head) * v_size + e[None, :]
    mask = (row < stop)[:, None] & (e < v_size)[None, :]
    tl.store(own_ptr + to, own.to(own_ptr.dtype.element_ty), mask=mask)
    right = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(k.dtype)
    seen = product(inverse, right, tl.zeros((LENGTH, D), dtype=tl.float32), PRECISION, WIDEN)
    to = (row[:, None] * heads + head) * d_size + d[None, :]
    mask = (row < stop)[:, None] & (d < d_size)[None, :]
    tl.store(seen_ptr + to, seen.to(seen_ptr.dtype.element_ty), mask=mask)


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
    at = d[:, None] * v_size + e[None, :]
    inside = at_d[:, None] & at_e[None, :]
    of_document = tl.program_id(0).to(tl.int64) * d_size * v_size
    state = tl.zeros((D, V), dtype=tl.float32)
    if INITIAL:
        state += tl.load(initial_ptr + of_document + at, mask=inside, other=0.0).to(tl.float32)
    start = tl.load(ends_ptr + document).to(tl.int64)
    end = tl.load(ends_ptr + document + 1).to(tl.int64)
    chunk = tl.load(chunks_ptr + document)
    size = tl.cast(heads, tl.int64) * t
    for nth in range(tl.load(chunks_ptr + document + 1) - chunk):
        first = start + nth * LENGTH
        stop = tl.minimum(first + LENGTH, end)
        row = first + tl.arange(0, LENGTH)
        live = row < stop
        total, rest = _sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), True, PAIR)
        last, last_rest = _sums(total_ptr, size, head * t + stop - 1, True, PAIR)
        seen = tl.load(
            seen_ptr + (row[:, None] * heads + head) * d_size + d[None, :],
            mask=live[:, None] & at_d[None, :],
            other=0.0,
        )
        k = tl.load(
            k_ptr + row[None, :] * stride_kt + head // share * stride_kh + d[:, None],
            mask=live[None, :] & at_d[:, None],
            other=0.0,
        )
        at_own = own_ptr + (row[:, None] * heads + head) * v_size + e[None, :]
        mask = live[:, None] & at_e[None, :]
        own = tl.load(at_own, mask=mask, other=0.0).to(tl.float32)
        narrow = state.to(k.dtype)
        to = before_ptr + ((chunk + nth) * heads + head) * d_size * v_size
        tl.store(to + at, narrow, mask=inside)
        nothing = tl.zeros((LENGTH, V), dtype=tl.float32)
        written = own - product(seen, narrow, nothing, PRECISION, WIDEN)
        tl.store(at_own, written.to(own_ptr.dtype.element_ty), mask=mask)
        left = _between(last, last_rest, total, rest, PAIR)
        written = (written * left[:, None]).to(k.dtype)
        state = product(k, written, state * tl.exp(last), PRECISION, WIDEN)
    tl.store(final_ptr + of_document + at, state, mask=inside)


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
    at_row = tl.minimum(row, stop - 1)
    d = tl.arange(0, D)
    e = tl.program_id(2) * V + tl.arange(0, V)
    at_d, at_e = d < d_size, e < v_size
    key_head = head // share
    q = tl.load(
        q_ptr + row[:, None] * stride_qt + key_head * stride_qh + d[None, :],
        mask=live[:, None] & at_d[None, :],
        other=0.0,
    )
    k = tl.load(
        k_ptr + row[None, :] * stride_kt + key_head * stride_kh + d[:, None],
        mask=live[None, :] & at_d[:, None],
        other=0.0,
    )
    total, rest = _sums(
        total_ptr, tl.cast(heads, tl.int64) * t, head * t + at_row, of_document, PAIR
    )
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    decay = _between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    shares = product(q, k, square, PRECISION, WIDEN) * decay
    shares = tl.where(i[:, None] >= i[None, :], shares, 0.0).to(q.dtype)
    before = tl.load(
        before_ptr + (chunk * heads + head) * d_size * v_size + d[:, None] * v_size + e[None, :],
        mask=at_d[:, None] & at_e[None, :] & of_document,
        other=0.0,
    )
    to = (row[:, None] * heads + head) * v_size + e[None, :]
    written = tl.load(written_ptr + to, mask=live[:, None] & at_e[None, :], other=0.0)
    y = product(q, before, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
    y = product(shares, written, y * tl.exp(total)[:, None], PRECISION, WIDEN) * scale
    mask = (row < stop)[:, None] & at_e[None, :]
    tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=mask)

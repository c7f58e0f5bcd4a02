"""Kernels of the backward of the gated delta rule, in Triton. Imported only by `triton.py`.

Beside the names in `triton_kernels.py`, T is the inverse of I + A, and G is the gradient of the
state behind a chunk. Because u = T (β v - β exp(t) k S), all that A and W do to the loss goes
through z:

    du = scale Σ_{i≥j} (q[i]·k[j]) exp(t[i]-t[j]) dy[i] + exp(t[L]-t[j]) G k[j]
    z  = Tᵀ du          dv = β z          dA[i,j] = - z[i]·u[j]          d(β exp(t) k) = - z Sᵀ
    G' = exp(t[L]) G + scale Σ_i exp(t[i]) q[i] ⊗ dy[i] - Wᵀ du      (the last chunk first)
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take pointers and strides by position

from __future__ import annotations

import triton
import triton.language as tl

from mcore_kernels.ops.chunks_triton import (
    between,
    chunk_rows,
    keep_tile,
    product,
    sums,
    tile,
    tile_across,
)


@triton.jit
def own_gradients_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    total_ptr,
    dwritten_ptr,
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
    stride_dyt,
    stride_dyh,
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
    """What du of a chunk and head owes to its own rows, V columns of it."""
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
    q = tile_across(
        q_ptr + head // share * stride_qh + first * stride_qt, i, stride_qt, live, d, at_d
    )
    k = tile(k_ptr + head // share * stride_kh + first * stride_kt, i, stride_kt, live, d, at_d)
    total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    decay = between(total[None, :], rest[None, :], total[:, None], rest[:, None], PAIR)
    shares = product(k, q, square, PRECISION, WIDEN) * decay * scale
    shares = tl.where(i[None, :] >= i[:, None], shares, 0.0).to(k.dtype)
    dy = tile(dy_ptr + head * stride_dyh + first * stride_dyt, i, stride_dyt, live, e, at_e)
    du = product(shares, dy, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
    keep_tile(
        dwritten_ptr + (first * heads + head) * v_size, i, heads * v_size, row < stop, e, at_e, du
    )


@triton.jit
def carry_back_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    total_ptr,
    dwritten_ptr,
    seen_ptr,
    dfinal_ptr,
    behind_ptr,
    dinitial_ptr,
    ends_ptr,
    chunks_ptr,
    t,
    heads,
    share,
    d_size,
    v_size,
    scale,
    stride_dyt,
    stride_dyh,
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
    """Gradients of states behind each chunk of a document and before its first; du whole."""
    document = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    d = tl.arange(0, D)
    e = tl.program_id(1) * V + tl.arange(0, V)
    at_d, at_e = d < d_size, e < v_size
    of_state = tl.cast(d_size, tl.int64) * v_size
    at_document = tl.program_id(0) * of_state
    state = tile(dfinal_ptr + at_document, d, v_size, at_d, e, at_e).to(tl.float32)
    start = tl.load(ends_ptr + document).to(tl.int64)
    end = tl.load(ends_ptr + document + 1).to(tl.int64)
    chunk = tl.load(chunks_ptr + document)
    number = tl.load(chunks_ptr + document + 1) - chunk
    size = tl.cast(heads, tl.int64) * t
    i = tl.arange(0, LENGTH)
    for step in range(number):
        nth = number - 1 - step
        first = start + nth * LENGTH
        stop = tl.minimum(first + LENGTH, end)
        row = first + i
        live = row < stop
        total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), True, PAIR)
        last, last_rest = sums(total_ptr, size, head * t + stop - 1, True, PAIR)
        k = tile(k_ptr + head // share * stride_kh + first * stride_kt, i, stride_kt, live, d, at_d)
        q = tile_across(
            q_ptr + head // share * stride_qh + first * stride_qt, i, stride_qt, live, d, at_d
        )
        seen = tile_across(
            seen_ptr + (first * heads + head) * d_size, i, heads * d_size, live, d, at_d
        )
        dy = tile(dy_ptr + head * stride_dyh + first * stride_dyt, i, stride_dyt, live, e, at_e)
        du = tile(
            dwritten_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e
        ).to(tl.float32)
        narrow = state.to(k.dtype)
        at_chunk = behind_ptr + ((chunk + nth) * heads + head) * of_state
        keep_tile(at_chunk, d, v_size, at_d, e, at_e, narrow)
        nothing = tl.zeros((LENGTH, V), dtype=tl.float32)
        left = between(last, last_rest, total, rest, PAIR)
        du += product(k, narrow, nothing, PRECISION, WIDEN) * left[:, None]
        keep_tile(
            dwritten_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e, du
        )
        dy = (dy.to(tl.float32) * (tl.exp(total) * scale)[:, None]).to(k.dtype)
        state = product(q, dy, state * tl.exp(last), PRECISION, WIDEN)
        state = product(seen, (-du).to(k.dtype), state, PRECISION, WIDEN)
    keep_tile(dinitial_ptr + at_document, d, v_size, at_d, e, at_e, state)


@triton.jit
def gradients_kernel(
    dy_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    total_ptr,
    inverse_ptr,
    written_ptr,
    dwritten_ptr,
    before_ptr,
    behind_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
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
    stride_dyt,
    stride_dyh,
    stride_qt,
    stride_qh,
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
    """All gradients of a chunk and head; dq and dk [r, T, K, D], of each head by itself.

    Matrices of rows by rows are [i, j]: what row i gets of j.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    of_document, first, stop = chunk_rows(chunk, ends_ptr, chunks_ptr, t, count, halvings, LENGTH)
    i = tl.arange(0, LENGTH)
    row = first + i
    live = (row < stop) & of_document
    size = tl.cast(heads, tl.int64) * t
    d = tl.arange(0, D)
    at_d = d < d_size
    square = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    nothing = tl.zeros((LENGTH, D), dtype=tl.float32)
    total, rest = sums(total_ptr, size, head * t + tl.minimum(row, stop - 1), of_document, PAIR)
    last, last_rest = sums(total_ptr, size, head * t + stop - 1, of_document, PAIR)
    at_state = (chunk * heads + head) * d_size * v_size
    at_k = k_ptr + head // share * stride_kh
    # Three parts, because all sums at once are more than a processor's registers. The first: what
    # rows left in the state behind the chunk.
    grad = nothing
    both = tl.full((), 0.0, dtype=tl.float32)
    for column in range(0, v_size, V):
        e = column + tl.arange(0, V)
        at_e = e < v_size
        written = tile(
            written_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e
        )
        before = tile(before_ptr + at_state, d, v_size, at_d & of_document, e, at_e)
        behind = tile(behind_ptr + at_state, d, v_size, at_d & of_document, e, at_e)
        grad = product(written, tl.trans(behind), grad, PRECISION, WIDEN)
        both += tl.sum(tl.sum(before.to(tl.float32) * behind.to(tl.float32), axis=1), axis=0)
    k = tile(at_k + first * stride_kt, i, stride_kt, live, d, at_d)
    dk = grad * between(last, last_rest, total, rest, PAIR)[:, None]
    kept = tl.sum(dk * k.to(tl.float32), axis=1)
    at_last = tl.sum(kept, axis=0) + tl.exp(last) * both
    dtotal = tl.where(row == stop - 1, at_last, 0.0) - kept
    # The second: what rows wrote, by the system of equations.
    at_inverse = inverse_ptr + (chunk * heads + head) * LENGTH * LENGTH
    inverse = tl.load(at_inverse + i[None, :] * LENGTH + i[:, None])
    beta = tl.load(beta_ptr + row * heads + head, mask=live, other=0.0).to(tl.float32)
    dbeta = tl.zeros((LENGTH,), dtype=tl.float32)
    grad = nothing
    pairs = square
    for column in range(0, v_size, V):
        e = column + tl.arange(0, V)
        at_e = e < v_size
        du = tile(dwritten_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e)
        z = product(inverse, du, tl.zeros((LENGTH, V), dtype=tl.float32), PRECISION, WIDEN)
        v = tile(v_ptr + head * stride_vh + first * stride_vt, i, stride_vt, live, e, at_e)
        dbeta += tl.sum(v.to(tl.float32) * z, axis=1)
        dv = z * beta[:, None]
        keep_tile(
            dv_ptr + (first * heads + head) * v_size, i, heads * v_size, row < stop, e, at_e, dv
        )
        z = z.to(du.dtype)
        written = tile(
            written_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e
        )
        before = tile(before_ptr + at_state, d, v_size, at_d & of_document, e, at_e)
        pairs = product(z, tl.trans(written), pairs, PRECISION, WIDEN)
        grad = product(z, tl.trans(before), grad, PRECISION, WIDEN)
    entering = tl.exp(total)
    k = tile(at_k + first * stride_kt, i, stride_kt, live, d, at_d)
    of_state = tl.sum(grad * k.to(tl.float32), axis=1) * entering
    dbeta -= of_state
    dtotal -= of_state * beta
    dk -= grad * (beta * entering)[:, None]
    decay = between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    # A row's pair with itself says nothing of what is kept between them.
    earlier = i[:, None] > i[None, :]
    pairs = tl.where(earlier, -pairs * decay, 0.0)
    scores = product(k, tl.trans(k), square, PRECISION, WIDEN) * pairs
    dbeta += tl.sum(scores, axis=1)
    scores *= beta[:, None]
    dtotal += tl.sum(scores, axis=1) - tl.sum(scores, axis=0)
    narrow = (pairs * beta[:, None]).to(k.dtype)
    dk = product(narrow, k, dk, PRECISION, WIDEN)
    dk = product(tl.trans(narrow), k, dk, PRECISION, WIDEN)
    tl.store(dbeta_ptr + row * heads + head, dbeta, mask=row < stop)
    # The third: what rows read.
    grad = nothing
    pairs = square
    for column in range(0, v_size, V):
        e = column + tl.arange(0, V)
        at_e = e < v_size
        dy = tile(dy_ptr + head * stride_dyh + first * stride_dyt, i, stride_dyt, live, e, at_e)
        written = tile(
            written_ptr + (first * heads + head) * v_size, i, heads * v_size, live, e, at_e
        )
        before = tile(before_ptr + at_state, d, v_size, at_d & of_document, e, at_e)
        pairs = product(dy, tl.trans(written), pairs, PRECISION, WIDEN)
        grad = product(dy, tl.trans(before), grad, PRECISION, WIDEN)
    q = tile(q_ptr + head // share * stride_qh + first * stride_qt, i, stride_qt, live, d, at_d)
    k = tile(at_k + first * stride_kt, i, stride_kt, live, d, at_d)
    dq = grad * (entering * scale)[:, None]
    dtotal += tl.sum(dq * q.to(tl.float32), axis=1)
    decay = between(total[:, None], rest[:, None], total[None, :], rest[None, :], PAIR)
    pairs = tl.where(i[:, None] >= i[None, :], pairs * decay * scale, 0.0)
    scores = product(q, tl.trans(k), square, PRECISION, WIDEN) * pairs
    scores = tl.where(earlier, scores, 0.0)
    dtotal += tl.sum(scores, axis=1) - tl.sum(scores, axis=0)
    narrow = pairs.to(k.dtype)
    dq = product(narrow, k, dq, PRECISION, WIDEN)
    dk = product(tl.trans(narrow), q, dk, PRECISION, WIDEN)
    keys = heads // share
    to = ((head % share * t + first) * keys + head // share) * d_size
    keep_tile(dq_ptr + to, i, keys * d_size, row < stop, d, at_d, dq)
    keep_tile(dk_ptr + to, i, keys * d_size, row < stop, d, at_d, dk)
    dg = tl.cumsum(tl.where(live, dtotal, 0.0), axis=0, reverse=True)
    tl.store(dg_ptr + row * heads + head, dg, mask=row < stop)

"""Triton kernels of products per expert in numbers of 8 bits. Imported by `triton.py` only.

Rows are walked over in pieces of 128 of one expert each; see there for the shapes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take all by position

from __future__ import annotations

import triton
import triton.language as tl

from mcore_kernels.ops.quantize.tile_triton import quantize_tile, size_bits


@triton.jit
def _piece(ends_ptr, piece, num_experts, EXPERTS: tl.constexpr):
    """The expert of a piece of 128 rows (E for none), its first row, and the rows that it has.

    `ends` [2, E]: where each expert's rows and pieces end.
    """
    of = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + num_experts + of, mask=of < num_experts, other=0x7FFFFFFF)
    before = ends <= piece
    expert = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    is_one = expert < num_experts
    start = tl.load(ends_ptr + expert - 1, mask=is_one & (expert > 0), other=0)
    end = tl.load(ends_ptr + expert, mask=is_one, other=0)
    row = start + (piece - first) * 128
    return expert, row, end - row


@triton.jit
def amax_kernel(
    x_ptr, bits_ptr, ends_ptr, num_experts, c, stride_r, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The bits of each expert's largest absolute value, the largest of its pieces'."""
    expert, row, rows = _piece(ends_ptr, tl.program_id(0), num_experts, EXPERTS)
    if expert < num_experts:
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        found = tl.zeros((32, BLOCK), dtype=tl.int32)
        for step in range(0, 4):
            local = step * 32 + tl.arange(0, 32)
            at = x_ptr + (row + local).to(tl.int64)[:, None] * stride_r + col[None, :]
            mask = (local < rows)[:, None] & (col < c)[None, :]
            found = tl.maximum(found, size_bits(tl.load(at, mask=mask, other=0.0).to(tl.float32)))
        tl.atomic_max(bits_ptr + expert, tl.max(tl.max(found, 1), 0))


@triton.jit
def encode_kernel(
    x_ptr,
    y_ptr,
    turned_ptr,
    s_ptr,
    st_ptr,
    ends_ptr,
    num_experts,
    c,
    of_weight,
    stride_r,
    step_turned,
    step_s,
    step_st,
    maximum,
    room,
    MODE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    WORDS: tl.constexpr,
    POWER: tl.constexpr,
    DTYPE: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A piece of rows, or a tile of a weight, to numbers and scales along and across."""
    piece, of_c = tl.program_id(0), tl.program_id(1)
    col = of_c * BLOCK_C
    if WEIGHTS:
        # Weights of `of_weight` rows each.
        pieces = tl.cdiv(of_weight, 128)
        expert, local = piece // pieces, piece % pieces
        row = expert * of_weight + local * 128
        rows = of_weight - local * 128
        here = True
    else:
        expert, row, rows = _piece(ends_ptr, piece, num_experts, EXPERTS)
        here = expert < num_experts
        local = piece
    if here:
        scale = 1.0
        if MODE == "one":
            scale = tl.load(s_ptr + expert)
        words = 32 if WORDS else 128
        turned = turned_ptr + col.to(tl.int64) * step_turned + local.to(tl.int64) * words
        filled = words
        if WEIGHTS:
            turned += expert.to(tl.int64) * c * step_turned
            filled = step_turned - local * words
        if MODE == "given":
            s_at = s_ptr + row
            st_at = st_ptr + col * step_st + expert
            if WEIGHTS:
                st_at = st_ptr + expert * c + col
        elif MODE == "pieces":
            s_at = s_ptr + row.to(tl.int64) * step_s + of_c
            st_at = st_ptr + col.to(tl.int64) * step_st + piece
        else:
            # Tiles of weights, whose scales are [E, tiles] one way and the other.
            tiles_c = tl.num_programs(1)
            s_at = s_ptr + piece * tiles_c + of_c
            st_at = st_ptr
            if WEIGHTS:
                st_at += (expert * tiles_c + of_c) * pieces + local
        quantize_tile(
            x_ptr + row.to(tl.int64) * stride_r + col, stride_r, 1,
            y_ptr + row.to(tl.int64) * c + col, c, turned, step_turned,
            s_at, step_s, st_at, step_st, scale, rows, c - col, filled, maximum, room,
            MODE, ALONG, ACROSS, WORDS, POWER, DTYPE, DIGITS, LEAST, 128, BLOCK_C,
        )  # fmt: skip


@triton.jit
def product_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    y_ptr,
    ends_ptr,
    num_experts,
    n,
    k,
    b_rows,
    b_width,
    a_width,
    BLOCKS: tl.constexpr,
    OF_TENSORS: tl.constexpr,
    FAST: tl.constexpr,
    WIDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of y = x Wᵀ: 128 rows of one expert, BLOCK_N columns."""
    # Neighbouring programs share the weight's rows.
    pieces = tl.num_programs(0) // tl.cdiv(n, BLOCK_N)
    expert, start, rows = _piece(ends_ptr, tl.program_id(0) % pieces, num_experts, EXPERTS)
    if expert < num_experts:
        col = tl.program_id(0) // pieces * BLOCK_N + tl.arange(0, BLOCK_N)
        local = tl.arange(0, 128)
        row = (start + local).to(tl.int64)
        in_m, in_n = local < rows, col < n
        of_b = expert.to(tl.int64) * n + col
        total = tl.zeros((128, BLOCK_N), dtype=tl.float32)
        for piece in range(0, tl.cdiv(k, 128)):
            inner = piece * 128 + tl.arange(0, 128)
            in_k = inner < k
            a = tl.load(
                a_ptr + row[:, None] * k + inner[None, :],
                mask=in_m[:, None] & in_k[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                b_ptr + of_b[None, :] * k + inner[:, None],
                mask=in_n[None, :] & in_k[:, None], other=0.0,
            )  # fmt: skip
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            if BLOCKS:
                down = tl.load(a_scale_ptr + row * a_width + piece, mask=in_m, other=0.0)
                of_tile = (expert * b_rows + col // 128) * b_width + piece
                across = tl.load(b_scale_ptr + of_tile, mask=in_n, other=0.0)
                product = tl.dot(a, b, input_precision="ieee")
                total += product * down[:, None] * across[None, :]
            elif FAST:
                total = tl.dot(a, b, total, input_precision="ieee")
            else:
                total += tl.dot(a, b, input_precision="ieee")
        if OF_TENSORS:
            total *= tl.load(a_scale_ptr + expert) * tl.load(b_scale_ptr + expert)
        elif not BLOCKS:
            down = tl.load(a_scale_ptr + row, mask=in_m, other=0.0)
            total *= down[:, None] * tl.load(b_scale_ptr + of_b, mask=in_n, other=0.0)[None, :]
        at = y_ptr + row[:, None] * n + col[None, :]
        tl.store(at, total.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def weight_grad_kernel(
    dy_ptr,
    dy_scale_ptr,
    x_ptr,
    x_scale_ptr,
    out_ptr,
    ends_ptr,
    num_experts,
    n_out,
    n_in,
    places,
    width,
    stride_expert,
    stride_out,
    BLOCKS: tl.constexpr,
    OF_TENSORS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of one expert's dyᵀ x, added to its float32 buffer."""
    expert = tl.program_id(1)
    ends = ends_ptr + num_experts
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    tiles_in = tl.cdiv(n_in, BLOCK_N)
    of_out = tl.program_id(0) // tiles_in * BLOCK_M + tl.arange(0, BLOCK_M)
    of_in = tl.program_id(0) % tiles_in * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = of_out < n_out, of_in < n_in
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for piece in range(start, end):
        inner = tl.cast(piece, tl.int64) * 128 + tl.arange(0, 128)
        dy = tl.load(
            dy_ptr + of_out.to(tl.int64)[:, None] * places + inner[None, :],
            mask=in_m[:, None], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_ptr + of_in.to(tl.int64)[None, :] * places + inner[:, None],
            mask=in_n[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            dy, x = dy.to(tl.float32), x.to(tl.float32)
        product = tl.dot(dy, x, input_precision="ieee")
        if BLOCKS:
            down = tl.load(dy_scale_ptr + of_out * width + piece, mask=in_m, other=0.0)
            across = tl.load(x_scale_ptr + of_in * width + piece, mask=in_n, other=0.0)
            product = product * down[:, None] * across[None, :]
        total += product
    if end > start:
        if OF_TENSORS:
            total *= tl.load(dy_scale_ptr + expert) * tl.load(x_scale_ptr + expert)
        elif not BLOCKS:
            down = tl.load(dy_scale_ptr + of_out * width + expert, mask=in_m, other=0.0)
            across = tl.load(x_scale_ptr + of_in * width + expert, mask=in_n, other=0.0)
            total *= down[:, None] * across[None, :]
        at = out_ptr + expert.to(tl.int64) * stride_expert
        at += of_out[:, None] * stride_out + of_in[None, :]
        # Nobody else adds there: the result is the same each time, and no program waits for it.
        tl.atomic_add(at, total, mask=in_m[:, None] & in_n[None, :], sem="relaxed")

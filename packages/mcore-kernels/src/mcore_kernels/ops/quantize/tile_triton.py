"""One tile of a matrix to numbers of 8 bits, both ways, in Triton. Imported by kernels only.

A tile is loaded as four tiles of every fourth row. Four codes that lie one above the other make a
word of 32 bits in one thread, and words are what is turned: single bytes, or halves, would go
through shared memory slowly.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917, PLR1714, SIM300 -- kernels take all by position, and know no sets

from __future__ import annotations

import triton
import triton.language as tl

from mcore_kernels.quant.scaling import SMALLEST

_SMALLEST = tl.constexpr(SMALLEST)


@triton.jit
def scale_from(amax, maximum, room, POWER: tl.constexpr):
    """`mcore_kernels.quant.scale_of`."""
    scale = tl.div_rn(amax, maximum) * room
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def size_bits(x):
    """The bits of float32 numbers without their signs: as large as they are, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _encode(x, maximum, DIGITS: tl.constexpr, LEAST: tl.constexpr, DTYPE: tl.constexpr):
    x = tl.where(x > maximum, maximum, tl.where(x < -maximum, -maximum, x))
    if DIGITS > 0:
        # Triton's interpreter loses a carry where it rounds to 8 bits: what it gets is exact.
        bits = x.to(tl.int32, bitcast=True)
        half = (1 << (22 - DIGITS)) - 1
        odd = (bits >> (23 - DIGITS)) & 1
        normal = (bits + half + odd) & (-1 << (23 - DIGITS))
        fixed = LEAST * 12582912.0  # 1.5 · 2^23 steps of the smallest number
        small = (x + fixed) - fixed
        near = tl.abs(x) < LEAST * (1 << DIGITS)
        code = tl.where(near, small, normal.to(tl.float32, bitcast=True)).to(DTYPE)
        # Nor does it keep NaN, which is 0x7F in both formats.
        return tl.where(size_bits(x) <= 0x7F800000, code.to(tl.uint8, bitcast=True), 0x7F).to(
            tl.uint8
        )
    # NVIDIA's assembler 12.8 fuses two conversions into one word, and loses one of them where its
    # bytes are stored too. So words are put together in an order that it cannot know.
    order = (maximum.to(tl.int32, bitcast=True) & 15) | 0x5410
    if DTYPE == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            _TO_E4M3, "=r,r,r,r,r,r,r,r,r", [x, order], dtype=tl.uint8, is_pure=True, pack=4
        )
    return tl.inline_asm_elementwise(
        _TO_E5M2, "=r,r,r,r,r,r,r,r,r", [x, order], dtype=tl.uint8, is_pure=True, pack=4
    )


_FOUR_CODES = """
{
.reg .b16 low, high;
.reg .b32 first, second;
cvt.rn.satfinite.FORMAT.f32 low, $2, $1;
cvt.rn.satfinite.FORMAT.f32 high, $4, $3;
cvt.u32.u16 first, low;
cvt.u32.u16 second, high;
prmt.b32 $0, first, second, $5;
}
"""
_TO_E4M3 = tl.constexpr(_FOUR_CODES.replace("FORMAT", "e4m3x2"))
_TO_E5M2 = tl.constexpr(_FOUR_CODES.replace("FORMAT", "e5m2x2"))
_TURN = tl.constexpr("""
{
.reg .b32 p, q, r, s;
prmt.b32 p, $4, $5, 0x5140;
prmt.b32 q, $6, $7, 0x5140;
prmt.b32 r, $4, $5, 0x7362;
prmt.b32 s, $6, $7, 0x7362;
prmt.b32 $0, p, q, 0x5410;
prmt.b32 $1, p, q, 0x7632;
prmt.b32 $2, r, s, 0x5410;
prmt.b32 $3, r, s, 0x7632;
}
""")


@triton.jit
def _word(a, b, c, d, INTERPRETED: tl.constexpr):
    """a + 2⁸ b + 2¹⁶ c + 2²⁴ d of bytes."""
    if INTERPRETED:
        low = a.to(tl.int32) | (b.to(tl.int32) << 8)
        return low | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
    # Four at a time. NVIDIA's assembler 12.8 crashes on the shifts, where the bytes are stored too.
    return tl.inline_asm_elementwise(
        _TURN, "=r,=r,=r,=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=4
    )


@triton.jit
def quantize_tile(
    x_at,
    stride_r,
    stride_c,
    y_at,
    step_y,
    turned_at,
    step_turned,
    s_at,
    step_s,
    st_at,
    step_st,
    scale,
    rows,
    columns,
    rows_turned,
    maximum,
    room,
    MODE: tl.constexpr,
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    WORDS: tl.constexpr,
    POWER: tl.constexpr,
    DTYPE: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the numbers of a tile of x along at `y_at` and across at `turned_at`, both uint8.

    The tile has `rows` and `columns`; across, numbers are written for `rows_turned`, zeros for what
    the tile has not. With WORDS `turned_at` are words of four rows, and `rows_turned` and
    `step_turned` count words.

    MODE "one": by `scale`. "given": by scales at `s_at` of rows and at `st_at` of columns, `step_s`
    and `step_st` apart. "pieces": scales of the tile's rows and columns are found and stored there;
    "tile": one scale, stored at both.
    """
    four = tl.arange(0, BLOCK_R // 4) * 4
    col = tl.arange(0, BLOCK_C)
    in_c = (col < columns)[None, :]
    at = x_at + four[:, None].to(tl.int64) * stride_r + col[None, :] * stride_c
    step = tl.cast(stride_r, tl.int64)
    x0 = tl.load(at, mask=(four < rows)[:, None] & in_c, other=0.0).to(tl.float32)
    x1 = tl.load(at + step, mask=(four + 1 < rows)[:, None] & in_c, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * step, mask=(four + 2 < rows)[:, None] & in_c, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * step, mask=(four + 3 < rows)[:, None] & in_c, other=0.0).to(tl.float32)
    if MODE == "pieces":
        b0, b1, b2, b3 = size_bits(x0), size_bits(x1), size_bits(x2), size_bits(x3)
        if ALONG:
            s0 = _found(tl.max(b0, 1), maximum, room, POWER)
            s1 = _found(tl.max(b1, 1), maximum, room, POWER)
            s2 = _found(tl.max(b2, 1), maximum, room, POWER)
            s3 = _found(tl.max(b3, 1), maximum, room, POWER)
            tl.store(s_at + four * step_s, s0, mask=four < rows)
            tl.store(s_at + (four + 1) * step_s, s1, mask=four + 1 < rows)
            tl.store(s_at + (four + 2) * step_s, s2, mask=four + 2 < rows)
            tl.store(s_at + (four + 3) * step_s, s3, mask=four + 3 < rows)
        if ACROSS:
            most = tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))
            across = _found(tl.max(most, 0), maximum, room, POWER)
            tl.store(st_at + col * step_st, across, mask=col < columns)
    elif MODE == "given":
        if ALONG:
            s0 = tl.load(s_at + four * step_s, mask=four < rows, other=1.0)
            s1 = tl.load(s_at + (four + 1) * step_s, mask=four + 1 < rows, other=1.0)
            s2 = tl.load(s_at + (four + 2) * step_s, mask=four + 2 < rows, other=1.0)
            s3 = tl.load(s_at + (four + 3) * step_s, mask=four + 3 < rows, other=1.0)
        if ACROSS:
            across = tl.load(st_at + col * step_st, mask=col < columns, other=1.0)
    else:
        if MODE == "tile":
            b0, b1, b2, b3 = size_bits(x0), size_bits(x1), size_bits(x2), size_bits(x3)
            most = tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3))
            scale = _found(tl.max(tl.max(most, 1), 0), maximum, room, POWER)
            if ALONG:
                tl.store(s_at, scale)
            if ACROSS:
                tl.store(st_at, scale)
        inverse = tl.div_rn(1.0, scale)
        q0 = _encode(x0 * inverse, maximum, DIGITS, LEAST, DTYPE)
        q1 = _encode(x1 * inverse, maximum, DIGITS, LEAST, DTYPE)
        q2 = _encode(x2 * inverse, maximum, DIGITS, LEAST, DTYPE)
        q3 = _encode(x3 * inverse, maximum, DIGITS, LEAST, DTYPE)
    if ALONG:
        if MODE == "pieces" or MODE == "given":
            q0 = _encode(x0 * tl.div_rn(1.0, s0)[:, None], maximum, DIGITS, LEAST, DTYPE)
            q1 = _encode(x1 * tl.div_rn(1.0, s1)[:, None], maximum, DIGITS, LEAST, DTYPE)
            q2 = _encode(x2 * tl.div_rn(1.0, s2)[:, None], maximum, DIGITS, LEAST, DTYPE)
            q3 = _encode(x3 * tl.div_rn(1.0, s3)[:, None], maximum, DIGITS, LEAST, DTYPE)
        to = y_at + four[:, None].to(tl.int64) * step_y + col[None, :]
        down = tl.cast(step_y, tl.int64)
        tl.store(to, q0, mask=(four < rows)[:, None] & in_c)
        tl.store(to + down, q1, mask=(four + 1 < rows)[:, None] & in_c)
        tl.store(to + 2 * down, q2, mask=(four + 2 < rows)[:, None] & in_c)
        tl.store(to + 3 * down, q3, mask=(four + 3 < rows)[:, None] & in_c)
    if ACROSS:
        if MODE == "pieces" or MODE == "given":
            turn = tl.div_rn(1.0, across)[None, :]
            q0 = _encode(x0 * turn, maximum, DIGITS, LEAST, DTYPE)
            q1 = _encode(x1 * turn, maximum, DIGITS, LEAST, DTYPE)
            q2 = _encode(x2 * turn, maximum, DIGITS, LEAST, DTYPE)
            q3 = _encode(x3 * turn, maximum, DIGITS, LEAST, DTYPE)
        if WORDS:
            words = tl.trans(_word(q0, q1, q2, q3, DIGITS > 0))
            of_four = tl.arange(0, BLOCK_R // 4)
            to = turned_at + col[:, None].to(tl.int64) * step_turned + of_four[None, :]
            mask = (col < columns)[:, None] & (of_four < rows_turned)[None, :]
            tl.store(to, words, mask=mask)
        else:
            to = turned_at + col[None, :].to(tl.int64) * step_turned + four[:, None]
            tl.store(to, q0, mask=(four < rows_turned)[:, None] & in_c)
            tl.store(to + 1, q1, mask=(four + 1 < rows_turned)[:, None] & in_c)
            tl.store(to + 2, q2, mask=(four + 2 < rows_turned)[:, None] & in_c)
            tl.store(to + 3, q3, mask=(four + 3 < rows_turned)[:, None] & in_c)


@triton.jit
def _found(bits, maximum, room, POWER: tl.constexpr):
    return scale_from(bits.to(tl.float32, bitcast=True), maximum, room, POWER)

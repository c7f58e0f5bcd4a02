"""Quantisation with its transpose in Triton. Imported only when it is chosen.

A program takes a tile of 128 × 128, from which it writes the numbers both ways. Scales of a whole
tensor or of whole rows are found before, that of a tensor in one pass over its memory; those of
pieces and tiles are found in it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0124, PLR0917 -- NaN is what differs from itself; kernels take all by position

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import interpreted, on_device
from mcore_kernels.ops.quantize.reference import ReferenceQuantize
from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import SMALLEST, Block, block_amax, scale_of
from mcore_kernels.tuning import tuned

_GIVEN, _PIECES, _TILE = 0, 1, 2
_SMALLEST = tl.constexpr(SMALLEST)


@triton.jit
def _scale(amax, maximum, room, POWER: tl.constexpr):
    scale = tl.div_rn(amax, maximum) * room
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def _amax(x, axis: tl.constexpr):
    # A maximum may pass over NaN, so NaN is looked for by itself.
    size = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=axis)
    return tl.where(tl.max((x != x).to(tl.int32), axis=axis) > 0, float("nan"), size)


@triton.jit
def _largest_kernel(x_ptr, bits_ptr, size, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        # Without its sign a number is as large as its bits are, and NaN larger than all.
        found = tl.maximum(found, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(bits_ptr, tl.max(found, axis=0))


@triton.jit
def _scale_kernel(bits_ptr, s_ptr, maximum, room, POWER: tl.constexpr):
    amax = tl.load(bits_ptr).to(tl.float32, bitcast=True)
    tl.store(s_ptr, _scale(amax, maximum, room, POWER))


@triton.jit
def _encode(x, maximum, DTYPE: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr):
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
        code = tl.where(x == x, code.to(tl.uint8, bitcast=True), 0x7F)
        return code.to(tl.uint8).to(DTYPE, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _quantize_kernel(
    x_ptr,
    y_ptr,
    yt_ptr,
    s_ptr,
    st_ptr,
    r,
    c,
    stride_r,
    stride_c,
    step_s,
    step_st,
    maximum,
    room,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POWER: tl.constexpr,
    DTYPE: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < r)[:, None] & (col < c)[None, :]
    at = x_ptr + row[:, None] * stride_r + col[None, :] * stride_c
    raw = tl.load(at, mask=mask, other=0.0)
    x = raw.to(tl.float32)
    if MODE == 0:
        down = tl.load(s_ptr + row * step_s, mask=row < r, other=1.0)
        across = tl.load(st_ptr + col * step_st, mask=col < c, other=1.0)
    elif MODE == 1:
        down = _scale(_amax(x, 1), maximum, room, POWER)
        across = _scale(_amax(x, 0), maximum, room, POWER)
        if ROWS:
            tl.store(s_ptr + row * tl.num_programs(1) + tl.program_id(1), down, mask=row < r)
        if COLUMNS:
            tl.store(st_ptr + col * tl.num_programs(0) + tl.program_id(0), across, mask=col < c)
    else:
        one = _scale(_amax(tl.reshape(x, (BLOCK * BLOCK,)), 0), maximum, room, POWER)
        down = tl.zeros((BLOCK,), dtype=tl.float32) + one
        across = down
        if ROWS:
            tl.store(s_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), one)
        if COLUMNS:
            tl.store(st_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), one)
    if ROWS:
        y = _encode(x * tl.div_rn(1.0, down)[:, None], maximum, DTYPE, DIGITS, LEAST)
        tl.store(y_ptr + row[:, None] * c + col[None, :], y, mask=mask)
    if COLUMNS:
        # Turned before it is rounded: single bytes go through shared memory slowly.
        turned = tl.trans(raw).to(tl.float32)
        y = _encode(turned * tl.div_rn(1.0, across)[:, None], maximum, DTYPE, DIGITS, LEAST)
        tl.store(
            yt_ptr + col[:, None] * r + row[None, :], y,
            mask=(col < c)[:, None] & (row < r)[None, :],
        )  # fmt: skip


class TritonQuantize(ReferenceQuantize):
    """`mcore_kernels.protocols.QuantizeOp`; blocks of other sizes are served by the reference."""

    def __call__(
        self,
        x: Tensor,
        fmt: Format,
        block: Block = (0, 0),
        *,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `QuantizeOp`."""
        if not _served(x, block, scale):
            return super().__call__(
                x, fmt, block, scale=scale, margin=margin, power_of_two=power_of_two
            )
        y, s, _, _ = _quantize(x, fmt, block, scale, margin, power_of_two, columns=False)
        return y, s

    def both(
        self,
        x: Tensor,
        fmt: Format,
        block: Block = (0, 0),
        *,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `QuantizeOp`."""
        if not _served(x, block, scale):
            return super().both(
                x, fmt, block, scale=scale, margin=margin, power_of_two=power_of_two
            )
        return _quantize(x, fmt, block, scale, margin, power_of_two, columns=True)


def _served(x: Tensor, block: Block, scale: Tensor | None) -> bool:
    if x.dtype == torch.float64 or not x.numel() or (scale is not None and block != (0, 0)):
        return False
    return block in ((0, 0), (1, 0), (1, 128), (128, 128))


def _tensor_scale(x: Tensor, fmt: Format, margin: int, power_of_two: bool) -> Tensor:
    """`scale_of` the largest value of x, which fills its memory, in two launches."""
    bits = torch.zeros(1, dtype=torch.int32, device=x.device)
    scale = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    size, block = x.numel(), 8192
    with on_device(x):
        _largest_kernel[(min(triton.cdiv(size, block), 1024),)](
            x, bits, size, BLOCK=block, num_warps=8
        )
        _scale_kernel[(1,)](bits, scale, fmt.maximum, 2.0**margin, POWER=power_of_two, num_warps=1)
    return scale


def _quantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    *,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.detach()
    r, c = x.shape
    y = torch.empty(r, c, dtype=fmt.dtype, device=x.device)
    yt = torch.empty(c, r, dtype=fmt.dtype, device=x.device) if columns else y
    tiles = triton.cdiv(r, 128), triton.cdiv(c, 128)
    mode = _GIVEN if block[1] == 0 else _PIECES if block[0] == 1 else _TILE
    if mode == _GIVEN:

        def found(matrix: Tensor) -> Tensor:
            if block == (0, 0) and (matrix.is_contiguous() or matrix.t().is_contiguous()):
                return _tensor_scale(matrix, fmt, margin, power_of_two)
            amax = block_amax(matrix, block)
            return scale_of(amax, fmt, margin=margin, power_of_two=power_of_two)

        s = found(x) if scale is None else scale
        st = found(x.t()) if columns and block[0] else s
    else:
        s = x.new_empty(r if mode == _PIECES else tiles[0], tiles[1], dtype=torch.float32)
        st = x.new_empty(c if mode == _PIECES else tiles[1], tiles[0], dtype=torch.float32)
    inexact = interpreted(x)
    digits, dtype = (3, tl.float8e4nv) if fmt.name == "e4m3" else (2, tl.float8e5)
    with on_device(x):
        _quantize_kernel[tiles](
            x, y, yt, s, st, r, c, x.stride(0), x.stride(1), s.stride(0) if s.numel() > 1 else 0,
            st.stride(0) if st.numel() > 1 else 0, fmt.maximum, 2.0**margin, MODE=mode, ROWS=True,
            COLUMNS=columns, POWER=power_of_two, DTYPE=dtype, DIGITS=digits if inexact else 0,
            LEAST=torch.finfo(fmt.dtype).smallest_normal * 2.0**-digits, BLOCK=128,
            num_warps=tuned("quantize", x.device, "warps")[0],
        )  # fmt: skip
    return y, s, yt, st


QUANTIZE = TritonQuantize()
"""The operator; it holds no state."""

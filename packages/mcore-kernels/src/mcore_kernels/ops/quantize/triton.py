"""Quantisation with its transpose in Triton. Imported only when it is chosen.

A program takes a tile, from which it writes the numbers both ways. The largest value of a whole
tensor is found before in one pass over its memory, whose programs leave a maximum each; those who
quantise take the largest of these themselves, and begin where that pass ended, as much of it is
still in the cache. Scales of whole rows are found before, those of pieces and tiles in the tile.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take all by position

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary, interpreted, on_device
from mcore_kernels.ops.quantize.reference import ReferenceQuantize
from mcore_kernels.ops.quantize.tile_triton import quantize_tile, scale_from, size_bits
from mcore_kernels.quant.formats import FORMATS, Format
from mcore_kernels.quant.scaling import Block, block_amax, scale_of
from mcore_kernels.tuning import tuned


@triton.jit
def _largest_kernel(x_ptr, bits_ptr, size, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        found = tl.maximum(found, size_bits(x))
    tl.store(bits_ptr + tl.program_id(0), tl.max(found, axis=0))


@triton.jit
def _quantize_kernel(
    x_ptr,
    y_ptr,
    turned_ptr,
    s_ptr,
    st_ptr,
    bits_ptr,
    num_bits,
    r,
    c,
    r_turned,
    stride_r,
    stride_c,
    step_turned,
    step_s,
    step_st,
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
    MANY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tiles_c = tl.cdiv(c, BLOCK_C)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    of_r, of_c = tile // tiles_c, tile % tiles_c
    row, col = of_r * BLOCK_R, of_c * BLOCK_C
    scale = 1.0
    if MODE == "one":
        if MANY > 0:
            of = tl.arange(0, MANY)
            most = tl.max(tl.load(bits_ptr + of, mask=of < num_bits, other=0), 0)
            scale = scale_from(most.to(tl.float32, bitcast=True), maximum, room, POWER)
            if tile == 0:
                tl.store(s_ptr, scale)
        else:
            scale = tl.load(s_ptr)
    if MODE == "given":
        s_at, st_at = s_ptr + row, st_ptr + col
    elif MODE == "pieces":
        s_at, st_at = s_ptr + row.to(tl.int64) * step_s + of_c, st_ptr + of_r
        st_at += col.to(tl.int64) * step_st
    else:
        s_at, st_at = s_ptr + of_r * step_s + of_c, st_ptr + of_c * step_st + of_r
    turned_row = of_r * (BLOCK_R // 4) if WORDS else row
    quantize_tile(
        x_ptr + row.to(tl.int64) * stride_r + col.to(tl.int64) * stride_c, stride_r, stride_c,
        y_ptr + row.to(tl.int64) * c + col, c,
        turned_ptr + col.to(tl.int64) * step_turned + turned_row, step_turned,
        s_at, step_s, st_at, step_st, scale, r - row, c - col, r_turned - turned_row, maximum, room,
        MODE, ALONG, ACROSS, WORDS, POWER, DTYPE, DIGITS, LEAST, BLOCK_R, BLOCK_C,
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
        if x.stride(0) == 1 and x.stride(1) != 1:
            # It lies across: what is read along its memory is turned, as of the whole it is.
            return _call(x.t(), fmt, block, scale, margin, power_of_two, along=False)[2:]
        return _call(x, fmt, block, scale, margin, power_of_two, across=False)[:2]

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
        return _call(x, fmt, block, scale, margin, power_of_two)

    def amax(self, x: Tensor) -> Tensor:
        """See `QuantizeOp`."""
        x = x.detach()
        filled = x.is_contiguous() or x.t().is_contiguous()
        if x.dtype == torch.float64 or not x.numel() or not filled:
            return super().amax(x)
        found: Tensor = _amax_op(x)
        return found


def _served(x: Tensor, block: Block, scale: Tensor | None) -> bool:
    if x.dtype == torch.float64 or not x.numel() or (scale is not None and block != (0, 0)):
        return False
    return block in ((0, 0), (1, 0), (1, 128), (128, 128))


def largest_bits(x: Tensor) -> Tensor:
    """int32: the largest of these is the bits of the largest absolute value of x, float32.

    x fills its memory.
    """
    size = x.numel()
    block, most, warps = tuned("quantize_amax", x.device, "block", "programs", "warps")
    bits = torch.empty(min(triton.cdiv(size, block), most), dtype=torch.int32, device=x.device)
    with on_device(x):
        _largest_kernel[(bits.numel(),)](x, bits, size, BLOCK=block, num_warps=warps)
    return bits


def number_options(x: Tensor, fmt: Format) -> dict[str, Any]:
    """What kernels have to know of a format: its type, and how the interpreter rounds to it."""
    digits, dtype = (3, tl.float8e4nv) if fmt.name == "e4m3" else (2, tl.float8e5)
    least = torch.finfo(fmt.dtype).smallest_normal * 2.0**-digits
    return {"DTYPE": dtype, "DIGITS": digits if interpreted(x) else 0, "LEAST": least}


def words_of(turned: Tensor) -> tuple[Tensor, bool]:
    """Numbers [..., R] as words of four where R allows it, else as bytes; and whether it does."""
    codes = turned.view(torch.uint8)
    whole = turned.shape[-1] % 4 == 0
    return (codes.view(torch.int32), True) if whole else (codes, False)


def _quantize(
    x: Tensor,
    fmt: Format,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    *,
    along: bool = True,
    across: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers along and across, each with its scales; of one that is not wanted nothing is in."""
    x = x.detach()
    r, c = x.shape
    y = torch.empty(r, c, dtype=fmt.dtype, device=x.device) if along else x.new_empty(0)
    yt = torch.empty(c, r, dtype=fmt.dtype, device=x.device) if across else x.new_empty(0)
    turned, whole = words_of(yt) if across else (yt.view(torch.uint8), False)
    bits, tile = None, (128, 128)
    rows, columns, warps = tuned("quantize", x.device, "rows", "columns", "warps")
    if block[1] == 0:
        mode, tile = "one" if block == (0, 0) else "given", (rows, columns)

        def found(matrix: Tensor) -> Tensor:
            amax = block_amax(matrix, block)
            return scale_of(amax, fmt, margin=margin, power_of_two=power_of_two)

        s = st = scale
        if mode == "given":
            s, st = found(x) if along else None, found(x.t()) if across else None
        elif scale is None and (x.is_contiguous() or x.t().is_contiguous()):
            bits, s = largest_bits(x), torch.empty(1, 1, dtype=torch.float32, device=x.device)
        elif scale is None:
            s = found(x)
        s = st if s is None else s
        st = s if st is None else st
    else:
        mode = "pieces" if block[0] == 1 else "tile"
        (warps,) = tuned("quantize_blocks", x.device, "warps")
        over_r, over_c = triton.cdiv(r, 128), triton.cdiv(c, 128)
        s = x.new_empty(r if mode == "pieces" else over_r, over_c, dtype=torch.float32)
        st = x.new_empty(c if mode == "pieces" else over_c, over_r, dtype=torch.float32)
    assert s is not None
    assert st is not None
    given = mode == "given"
    with on_device(x):
        _quantize_kernel[(triton.cdiv(r, tile[0]) * triton.cdiv(c, tile[1]),)](
            x, y.view(torch.uint8), turned, s, st, s if bits is None else bits,
            0 if bits is None else bits.numel(), r, c, turned.shape[-1], x.stride(0), x.stride(1),
            turned.stride(0) if across else 0, 1 if given else s.stride(0),
            1 if given else st.stride(0), fmt.maximum, 2.0**margin,
            MODE=mode, ALONG=along, ACROSS=across, WORDS=whole, POWER=power_of_two,
            MANY=0 if bits is None else triton.next_power_of_2(bits.numel()),
            BLOCK_R=tile[0], BLOCK_C=tile[1], **number_options(x, fmt), num_warps=warps,
        )  # fmt: skip
    return y, s, yt, st


def _apart(
    x: Tensor,
    fmt: str,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    along: bool,
    across: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_quantize`, the results apart from each other and from the arguments."""
    rows, columns = block  # torch makes a list of it
    y, s, yt, st = _quantize(
        x, FORMATS[fmt], (rows, columns), scale, margin, power_of_two, along=along, across=across
    )
    return y, s if s is not scale else s.clone(), yt, st.clone() if st is s or st is scale else st


def _apart_fake(
    x: Tensor,
    fmt: str,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    along: bool,
    across: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (r, c), dtype, (rows, columns) = x.shape, FORMATS[fmt].dtype, block
    y = x.new_empty(r, c, dtype=dtype) if along else x.new_empty(0)
    yt = x.new_empty(c, r, dtype=dtype) if across else x.new_empty(0)
    over = [1 if size == 0 else -(-length // size) for length, size in ((r, rows), (c, columns))]
    turned = [1 if size == 0 else -(-length // size) for length, size in ((c, rows), (r, columns))]
    if columns == 0:  # one that is not wanted has the other's scales
        over, turned = over if along else turned, turned if across else over
    s, st = (x.new_empty(shape, dtype=torch.float32) for shape in (over, turned))
    return y, s, yt, st


def _amax(x: Tensor) -> Tensor:
    return largest_bits(x).amax().view(torch.float32).view(1)


_LIBRARY = OpLibrary()
_apart_op = _LIBRARY.define(
    "quantize(Tensor x, str fmt, int[] block, Tensor? scale, int margin, bool power_of_two, "
    "bool along, bool across) -> (Tensor, Tensor, Tensor, Tensor)",
    _apart,
    fake=_apart_fake,
)
_amax_op = _LIBRARY.when_compiled(
    "quantize_amax(Tensor x) -> Tensor",
    _amax,
    fake=lambda x: x.new_empty(1, dtype=torch.float32),
)


def _call(
    x: Tensor,
    fmt: Format,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    *,
    along: bool = True,
    across: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_quantize`; where a compiler traces it is an operator, which gives no tensor twice."""
    if not torch.compiler.is_compiling():
        return _quantize(x, fmt, block, scale, margin, power_of_two, along=along, across=across)
    y, s, yt, st = _apart_op(
        x.detach(), fmt.name, block, scale, margin, power_of_two, along, across
    )
    return y, s, yt, st


QUANTIZE = TritonQuantize()
"""The operator; it holds no state."""

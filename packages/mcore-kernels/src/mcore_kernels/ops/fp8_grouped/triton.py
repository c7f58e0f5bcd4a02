"""Products per expert in numbers of 8 bits in Triton. Imported only when it is chosen.

Where the experts' rows end is read on the device, so no count comes back to the host. Rows are
walked over in pieces of 128 of one expert each, the last of an expert padded; a program finds the
expert of its piece among all at once. Across, pieces lie one after another, so that what weight
gradients sum over comes in whole pieces of 128 with nothing to mask.

Shapes: R rows sorted by expert, C columns, E experts, N output columns, K summed over.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"
# ruff: noqa: PLR0917 -- kernels take all by position

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_kernels.custom_ops import interpreted, on_device
from mcore_kernels.ops.fp8_grouped.reference import (
    ROOM,
    ReferenceFp8Grouped,
    across_scales,
    num_places,
)
from mcore_kernels.ops.grouped_linear.base import slices
from mcore_kernels.ops.quantize.tile_triton import quantize_tile, size_bits
from mcore_kernels.ops.quantize.triton import number_options, words_of
from mcore_kernels.protocols.quant import Counts, Numbers
from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import Block, block_amax, scale_of
from mcore_kernels.tuning import tuned


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
def _amax_kernel(
    x_ptr, bits_ptr, ends_ptr, num_experts, c, stride_r, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
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
def _encode_kernel(
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
def _product_kernel(
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
def _weight_grad_kernel(
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


class TritonFp8Grouped(ReferenceFp8Grouped):
    """`mcore_kernels.protocols.Fp8GroupedOp`; other blocks and float64 go to the reference."""

    def amax(self, x: Tensor, counts: Counts | None) -> Tensor:
        """See `Fp8GroupedOp`."""
        if counts is None and x.is_contiguous() and x.numel():
            counts, x = (x.shape[1],) * x.shape[0], x.view(-1, x.shape[2])
        if counts is None or x.dtype == torch.float64 or not x.numel() or x.stride(1) != 1:
            return super().amax(x, counts)
        ends = _ends(counts, x.device)
        bits = torch.zeros(len(counts), dtype=torch.int32, device=x.device)
        grid = num_places(counts, x.shape[0]) // ROOM, triton.cdiv(x.shape[1], 256)
        with on_device(x):
            _amax_kernel[grid](
                x, bits, ends, len(counts), x.shape[1], x.stride(0), BLOCK=256,
                EXPERTS=_wide(len(counts)), num_warps=8,
            )  # fmt: skip
        return bits.view(torch.float32)

    def encode(
        self,
        x: Tensor,
        counts: Counts | None,
        fmt: Format,
        block: Block,
        *,
        along: bool = True,
        across: bool = True,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Numbers | None, Numbers | None]:
        """See `Fp8GroupedOp`."""
        known = block in ((0, 0), (1, 0), (1, 128) if counts is not None else (128, 128))
        if not known or x.dtype == torch.float64 or not x.numel():
            return super().encode(
                x, counts, fmt, block, along=along, across=across, scale=scale, margin=margin,
                power_of_two=power_of_two,
            )  # fmt: skip
        x = x if x.stride(-1) == 1 and (counts is not None or x.is_contiguous()) else x.contiguous()
        if block == (0, 0) and scale is None:
            amax = self.amax(x, counts)
            scale = scale_of(amax, fmt, margin=margin, power_of_two=power_of_two)
        return _encode(x, counts, fmt, block, scale, margin, power_of_two, along, across)

    def product(
        self,
        x: Numbers,
        weight: Numbers,
        counts: Counts,
        *,
        x_block: Block,
        weight_block: Block,
        dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:
        """See `Fp8GroupedOp`."""
        (rows, k), (experts, n, _) = x[0].shape, weight[0].shape
        if (
            dtype == torch.float64
            or not x[0].numel()
            or not n
            or not _paired(x_block, weight_block)
        ):
            return super().product(
                x, weight, counts, x_block=x_block, weight_block=weight_block, dtype=dtype,
                fast=fast,
            )  # fmt: skip
        y = torch.empty(rows, n, dtype=dtype, device=x[0].device)
        # Sums that are taken in between want registers of their own, so their tiles are smaller.
        name = "fp8_grouped_fast" if fast and not x_block[1] else "fp8_grouped"
        block_n, warps, stages = tuned(name, y.device, "block_n", "warps", "stages")
        block_n = min(block_n, max(16, triton.next_power_of_2(n)))
        grid = (num_places(counts, rows) // ROOM * triton.cdiv(n, block_n),)
        with on_device(y):
            _product_kernel[grid](
                x[0].contiguous(), x[1].contiguous(), weight[0].contiguous(),
                weight[1].contiguous(), y, _ends(counts, y.device), experts, n, k,
                weight[1].shape[1], weight[1].shape[2], x[1].shape[1], BLOCKS=x_block[1] > 0,
                OF_TENSORS=x_block == (0, 0), FAST=fast, WIDEN=interpreted(y),
                EXPERTS=_wide(len(counts)), BLOCK_N=block_n, num_warps=warps, num_stages=stages,
            )  # fmt: skip
        return y

    def weight_grad(
        self, dy: Numbers, x: Numbers, counts: Counts, *, block: Block, out: Tensor
    ) -> None:
        """See `Fp8GroupedOp`; buffers but float32 ones are served by the reference."""
        if out.dtype != torch.float32 or out.stride(2) != 1 or not _paired(block, block):
            super().weight_grad(dy, x, counts, block=block, out=out)
            return
        if not (x[0].numel() and out.numel()):
            return
        experts, n_out, n_in = out.shape
        names = ("block_m", "block_n", "warps", "stages")
        most_m, most_n, warps, stages = tuned("fp8_grouped_weight_grad", out.device, *names)
        block_m = min(most_m, max(16, triton.next_power_of_2(n_out)))
        block_n = min(most_n, max(16, triton.next_power_of_2(n_in)))
        grid = triton.cdiv(n_out, block_m) * triton.cdiv(n_in, block_n), experts
        with on_device(out):
            _weight_grad_kernel[grid](
                dy[0].contiguous(), dy[1].contiguous(), x[0].contiguous(), x[1].contiguous(), out,
                _ends(counts, out.device), experts, n_out, n_in, x[0].shape[1], x[1].shape[1],
                out.stride(0), out.stride(1), BLOCKS=block[1] > 0, OF_TENSORS=block == (0, 0),
                WIDEN=interpreted(out), BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip


def _paired(a: Block, b: Block) -> bool:
    """Whether a program knows such scales together."""
    return (a, b) in (
        ((0, 0), (0, 0)),
        ((1, 0), (1, 0)),
        ((1, 128), (128, 128)),
        ((1, 128), (1, 128)),
    )


def _encode(
    x: Tensor,
    counts: Counts | None,
    fmt: Format,
    block: Block,
    scale: Tensor | None,
    margin: int,
    power_of_two: bool,
    along: bool,
    across: bool,
) -> tuple[Numbers | None, Numbers | None]:
    weights = counts is None
    c, device = x.shape[-1], x.device
    experts, of_weight = x.shape[:2] if counts is None else (len(counts), 0)
    width = of_weight if counts is None else num_places(counts, x.shape[0])
    y = torch.empty(x.shape if along else 0, dtype=fmt.dtype, device=device)
    shape = ((experts, c, width) if weights else (c, width)) if across else 0
    yt = torch.empty(shape, dtype=fmt.dtype, device=device)
    turned, whole = words_of(yt) if across else (yt.view(torch.uint8), False)
    mode = "one" if block == (0, 0) else "given" if block == (1, 0) else "tile"
    if block == (1, 128):
        mode = "pieces"
    if mode == "one":
        assert scale is not None
        s = st = scale.float().view(-1, *(1 for _ in x.shape[1:]))
    elif mode == "given":
        s, st = (
            scale_of(amax, fmt, margin=margin, power_of_two=power_of_two)
            for amax in _row_amax(x, counts, along=along, across=across)
        )
    else:
        s, st = _room(x, counts, width)
    pieces = experts * triton.cdiv(of_weight, ROOM) if weights else width // ROOM
    rows = x.view(-1, c) if weights else x
    names = "quantize_blocks" if mode in ("pieces", "tile") else "quantize"
    with on_device(x):
        _encode_kernel[(pieces, triton.cdiv(c, 128))](
            rows, y.view(torch.uint8), turned, s, st,
            s if counts is None else _ends(counts, device), experts, c, of_weight, rows.stride(0),
            turned.shape[-1] if across else 0, 1 if mode == "given" else s.shape[-1],
            st.shape[-1], fmt.maximum, 2.0**margin, MODE=mode, WEIGHTS=weights, ALONG=along,
            ACROSS=across, WORDS=whole, POWER=power_of_two, EXPERTS=_wide(experts),
            BLOCK_C=128, **number_options(x, fmt), num_warps=tuned(names, device, "warps")[0],
        )  # fmt: skip
    return (y, s) if along else None, (yt, st) if across else None


def _row_amax(
    x: Tensor, counts: Counts | None, *, along: bool, across: bool
) -> tuple[Tensor, Tensor]:
    """The largest values of rows, and of the columns of each expert; the latter one by one."""
    empty = x.new_empty(0, 1, dtype=torch.float32)
    if counts is None:
        down, over = x.abs().amax(2, keepdim=True), x.abs().amax(1).unsqueeze(2)
        return down.float(), over.float()
    down = block_amax(x, (1, 0)) if along else empty
    if not across:
        return down, empty
    over = x.new_zeros(x.shape[1], len(counts), dtype=torch.float32)
    for i, rows in slices(counts, x.shape[0]):
        over[:, i : i + 1] = block_amax(x[rows].t(), (1, 0))
    return down, over


def _room(x: Tensor, counts: Counts | None, width: int) -> tuple[Tensor, Tensor]:
    """Room for scales of blocks, along and across."""
    tiles = -(-x.shape[-1] // ROOM)
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    if counts is None:
        experts, down = x.shape[0], -(-width // ROOM)
        shapes = ((experts, down, tiles), (experts, tiles, down))
    else:
        shapes = ((x.shape[0], tiles), across_scales(x.shape[1], len(counts), width, (1, ROOM)))
    along, across = (torch.empty(one, dtype=torch.float32, device=x.device) for one in shapes)
    return along, across


def _ends(counts: Counts, device: torch.device) -> Tensor:
    """Where each expert's rows and its pieces of 128 end, int32 [2, E]."""
    if isinstance(counts, Tensor):
        both = torch.stack([counts, (counts + ROOM - 1) // ROOM])
        return both.to(device).cumsum(1, dtype=torch.int32)
    pieces = (-(-count // ROOM) for count in counts)
    return torch.tensor(
        [list(accumulate(counts)), list(accumulate(pieces))], dtype=torch.int32, device=device
    )


def _wide(experts: int) -> int:
    return triton.next_power_of_2(experts)


GROUPED = TritonFp8Grouped()
"""The operator; it holds no state."""

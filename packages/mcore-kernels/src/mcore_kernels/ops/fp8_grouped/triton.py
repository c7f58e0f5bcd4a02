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
from torch import Tensor

from mcore_kernels.custom_ops import interpreted, on_device
from mcore_kernels.ops.fp8_grouped.reference import (
    ROOM,
    ReferenceFp8Grouped,
    across_scales,
    num_places,
)
from mcore_kernels.ops.fp8_grouped.triton_kernels import (
    amax_kernel,
    encode_kernel,
    product_kernel,
    weight_grad_kernel,
)
from mcore_kernels.ops.grouped_linear.base import slices
from mcore_kernels.ops.quantize.triton import number_options, words_of
from mcore_kernels.protocols.quant import Counts, Numbers
from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import Block, block_amax, scale_of
from mcore_kernels.tuning import tuned


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
        block, warps = tuned("fp8_grouped_amax", x.device, "block", "warps")
        grid = num_places(counts, x.shape[0]) // ROOM, triton.cdiv(x.shape[1], block)
        with on_device(x):
            amax_kernel[grid](
                x, bits, ends, len(counts), x.shape[1], x.stride(0), BLOCK=block,
                EXPERTS=_wide(len(counts)), num_warps=warps,
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
            product_kernel[grid](
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
            weight_grad_kernel[grid](
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
        encode_kernel[(pieces, triton.cdiv(c, 128))](
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

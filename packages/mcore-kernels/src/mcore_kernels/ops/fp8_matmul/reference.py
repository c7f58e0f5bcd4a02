"""The product of numbers of 8 bits by way of float32. M, N rows of the factors, K summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.quant.scaling import Block, dequantize


@torch.no_grad()
def fp8_matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    a_block: Block,
    b_block: Block,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """See `mcore_kernels.protocols.Fp8MatmulOp`."""
    wide = torch.promote_types(dtype, torch.float32)
    x, y = dequantize(a, a_scale, a_block).to(wide), dequantize(b, b_scale, b_block).to(wide)
    return (x @ y.t()).to(dtype)


def native_limits(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, **options: Any
) -> str | None:
    """What torch's scaled product takes."""
    blocks, dtype = (options["a_block"], options["b_block"]), options["dtype"]
    if blocks[0] == (1, 128) and blocks[1] in ((1, 128), (128, 128)):
        if not a.dtype == b.dtype == torch.float8_e4m3fn:
            return "needs e4m3 in both factors for scales of blocks"
        sizes, least = (a.shape[0], b.shape[0], a.shape[1]), 128 if blocks[1][0] == 128 else 16
        if any(size % least for size in sizes) or not (a.numel() and b.numel()):
            return f"needs sizes that {least} divides for scales of blocks {blocks}, got {sizes}"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"gives bfloat16 or float32 for blocks, not {dtype}"
        return None
    if blocks not in (((0, 0), (0, 0)), ((1, 0), (1, 0))):
        return f"takes no scales of blocks {blocks}"
    if a.shape[1] % 16 or b.shape[0] % 16 or not (a.numel() and b.numel()):
        return f"needs sizes that 16 divides, got {a.shape[1]} summed and {b.shape[0]} columns"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "needs e4m3 in one factor"
    if blocks[0] == (1, 0) and dtype != torch.bfloat16:
        return f"gives bfloat16 for scales of rows, not {dtype}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"gives 16-bit numbers or float32, not {dtype}"
    return None

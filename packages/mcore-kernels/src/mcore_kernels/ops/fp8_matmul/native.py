"""The product of numbers of 8 bits by torch's scaled matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.quant.scaling import Block


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
    if a_block[1]:
        return _by_blocks(a, a_scale, b, b_scale, b_block=b_block, dtype=dtype)
    if a_block == (0, 0):
        a_scale, b_scale = a_scale.view(()), b_scale.view(())
    else:
        a_scale, b_scale = a_scale.view(-1, 1), b_scale.view(1, -1)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast
    )


def _by_blocks(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, b_block: Block, dtype: torch.dtype
) -> Tensor:
    """Pieces of 128 with pieces or tiles; the product wants scales of pieces column by column, and
    those of tiles with room for a multiple of four along what is summed.
    """
    pieces, tiles = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    if b_block == (1, 128):
        b_kind, b_scale = pieces, _columns(b_scale)
    else:
        b_kind, b_scale = tiles, F.pad(b_scale, (0, -b_scale.shape[1] % 4)).t()
    return F.scaled_mm(
        a.contiguous(), b.contiguous().t(), _columns(a_scale), pieces, b_scale, b_kind,
        output_dtype=dtype,
    )  # fmt: skip


def _columns(scale: Tensor) -> Tensor:
    return scale.t().contiguous().t()

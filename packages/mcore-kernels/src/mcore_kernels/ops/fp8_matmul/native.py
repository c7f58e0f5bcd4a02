"""The product of numbers of 8 bits by torch's scaled matrix product."""

from __future__ import annotations

import torch
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
    if a_block == (0, 0):
        a_scale, b_scale = a_scale.view(()), b_scale.view(())
    else:
        a_scale, b_scale = a_scale.view(-1, 1), b_scale.view(1, -1)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast
    )

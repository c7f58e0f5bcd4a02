"""Layer norm, as torch defines it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """See `mcore_kernels.protocols.LayerNormOp`."""
    shape = (x.shape[-1],)
    same = weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype)
    if same and not zero_centered:
        # torch's kernel keeps its sums in float32 and rounds once.
        return F.layer_norm(x, shape, weight, bias, eps)
    wide = accumulation_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(wide)
    factor = weight.to(wide)
    factor = factor + 1.0 if zero_centered else factor
    return F.layer_norm(x.to(wide), shape, factor, wide_bias, eps).to(x.dtype)

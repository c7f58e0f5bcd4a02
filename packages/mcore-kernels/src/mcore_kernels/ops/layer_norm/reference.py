"""Layer norm, as torch defines it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.LayerNormOp`."""
    shape = (x.shape[-1],)
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        # torch's kernel keeps its sums in float32 and rounds once.
        return F.layer_norm(x, shape, weight, bias, eps)
    wide = accumulation_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), shape, weight.to(wide), wide_bias, eps).to(x.dtype)

"""RMS norm, as torch defines it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    shape = (x.shape[-1],)
    if weight.dtype == x.dtype:
        # torch keeps its sums, and the product with the weight, in float32.
        return F.rms_norm(x, shape, weight, eps)
    wide = accumulation_dtype(x.dtype)
    return F.rms_norm(x.to(wide), shape, weight.to(wide), eps).to(x.dtype)

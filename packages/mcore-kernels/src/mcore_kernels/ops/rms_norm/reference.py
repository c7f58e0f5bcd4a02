"""RMS norm, as torch defines it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    shape = (x.shape[-1],)
    if weight is None or (weight.dtype == x.dtype and not zero_centered):
        # torch keeps its sums, and the product with the weight, in float32.
        return F.rms_norm(x, shape, weight, eps)
    wide = accumulation_dtype(x.dtype)
    factor = weight.to(wide)
    return F.rms_norm(x.to(wide), shape, factor + 1.0 if zero_centered else factor, eps).to(x.dtype)

"""RMS norm, as torch defines it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.RmsNormOp`."""
    # One dtype throughout: torch takes mixed ones down another path, with other roundings.
    wide = accumulation_dtype(x.dtype)
    y = F.rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide), eps)
    return y.to(x.dtype)

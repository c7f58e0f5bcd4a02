"""The sum with a residual and its RMS norm, one after the other."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.AddRmsNormOp`; ValueError when the shapes differ."""
    check_same_shape(x, residual)
    total = x + residual
    wide = accumulation_dtype(total.dtype)
    factor = weight.to(wide)
    factor = factor + 1.0 if zero_centered else factor
    return F.rms_norm(total.to(wide), (x.shape[-1],), factor, eps).to(x.dtype), total


def check_same_shape(x: Tensor, residual: Tensor) -> None:
    """ValueError unless x and the residual have one shape."""
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm: x and residual must have one shape, got {tuple(x.shape)} and "
            f"{tuple(residual.shape)}"
        )

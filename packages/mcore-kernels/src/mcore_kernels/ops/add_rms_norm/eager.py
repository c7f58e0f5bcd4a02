"""The sum with a residual, and the RMS norm for CPU."""

from __future__ import annotations

from torch import Tensor

from mcore_kernels.ops.add_rms_norm.reference import check_same_shape
from mcore_kernels.ops.rms_norm.eager import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.AddRmsNormOp`; ValueError when the shapes differ."""
    check_same_shape(x, residual)
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered).to(x.dtype), total

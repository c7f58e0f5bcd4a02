"""The sum with a residual and its RMS norm, one after the other."""

from __future__ import annotations

from torch import Tensor

from mcore_kernels.ops.rms_norm.reference import rms_norm


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.AddRmsNormOp`; ValueError when the shapes differ."""
    check_same_shape(x, residual)
    total = x + residual
    return rms_norm(total, weight, eps, zero_centered=zero_centered).to(x.dtype), total


def check_same_shape(x: Tensor, residual: Tensor) -> None:
    """ValueError unless x and the residual have one shape."""
    if x.shape != residual.shape:
        raise ValueError(
            f"add_rms_norm: x and residual must have one shape, got {tuple(x.shape)} and "
            f"{tuple(residual.shape)}"
        )

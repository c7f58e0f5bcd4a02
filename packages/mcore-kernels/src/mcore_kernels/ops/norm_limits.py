"""Which arguments the Triton norms take (apart from the kernels: asked without triton)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HIDDEN = 16_384
"""A row is held in registers, four times over in the backward."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _limits(x: Tensor, *others: Tensor | None) -> str | None:
    """None, or why the kernels cannot take these arguments."""
    if x.shape[-1] > MAX_HIDDEN:
        return f"rows of {x.shape[-1]} elements, at most {MAX_HIDDEN}"
    for one in (x, *others):
        if one is not None and one.dtype not in DTYPES:
            return f"{one.dtype}; the kernels compute in float32"
    return None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, zero_centered: bool = False
) -> str | None:
    """Limits of the RMS norm."""
    return _limits(x, weight)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
) -> str | None:
    """Limits of the layer norm."""
    return _limits(x, weight, bias)


def l2_norm(x: Tensor, eps: float) -> str | None:
    """Limits of the L2 norm."""
    return _limits(x)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
) -> str | None:
    """Limits of the RMS norm behind a sum."""
    return _limits(x, residual, weight)

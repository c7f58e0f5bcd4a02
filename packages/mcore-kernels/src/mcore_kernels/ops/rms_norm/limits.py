"""Which arguments the Triton RMS norm takes (apart from the kernels: asked without triton)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HIDDEN = 16_384
"""A row is held in registers, four times over in the backward."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def limits(x: Tensor, weight: Tensor, eps: float) -> str | None:
    """None, or why the kernels cannot take these arguments."""
    if x.shape[-1] > MAX_HIDDEN:
        return f"rows of {x.shape[-1]} elements, at most {MAX_HIDDEN}"
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"{x.dtype} with a weight of {weight.dtype}; the kernels compute in float32"
    return None

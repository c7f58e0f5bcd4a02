"""Which arguments the Triton SwiGLU takes (apart from the kernels: asked without triton)."""

from __future__ import annotations

import torch
from torch import Tensor


def limits(gate_up: Tensor) -> str | None:
    """None, or why the kernels cannot take these arguments."""
    if gate_up.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{gate_up.dtype}; the kernels compute in float32"
    return None

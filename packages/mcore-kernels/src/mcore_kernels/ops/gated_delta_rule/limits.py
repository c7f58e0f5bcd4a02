"""What the Triton kernels of the gated delta rule take. Apart from them: they import triton."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_HEAD = 256


def limits(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: object) -> str | None:
    """None where the kernels can serve the call, else why not; `check` has the rest."""
    most = MAX_HEAD // 2 if q.dtype == torch.float32 else MAX_HEAD
    if q.dtype == torch.float64:
        return "takes no float64"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > most:
        return f"takes heads of at most {most}, got {q.shape[-1]} and {v.shape[-1]}"
    return None

"""Which arguments the Triton kernel takes (apart from it, since it is asked without triton)."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def limits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> str | None:
    """None, or why the kernel cannot take these arguments."""
    for x in (q, k):
        if x.dtype not in _DTYPES:
            return f"{x.dtype}; the kernel computes in float32"
    return None

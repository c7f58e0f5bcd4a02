"""Which arguments the Triton activations take (apart from the kernels: asked without triton)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def limits(*tensors: Any, **named: Any) -> str | None:
    """None, or why the kernels cannot take these arguments."""
    for one in (*tensors, *named.values()):
        if isinstance(one, Tensor) and one.dtype not in _DTYPES:
            return f"{one.dtype}; the kernels compute in float32"
    return None

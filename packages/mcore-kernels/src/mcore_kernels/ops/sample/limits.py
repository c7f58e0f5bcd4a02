"""What the Triton kernels of sampling take. Apart from them: they import triton."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_VOCABULARY = 2**22


def limits(logits: Tensor, uniform: Tensor, **_: object) -> str | None:
    """None where the kernels can serve the call, else why not."""
    if logits.dtype == torch.float64:
        return "takes no float64"
    if logits.shape[1] > MAX_VOCABULARY:
        return f"takes at most {MAX_VOCABULARY} entries, got {logits.shape[1]}"
    return None

"""What the Triton kernel of Adam takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def limits(value: Tensor, grad: Tensor, *rest: Any, **options: Any) -> str | None:
    """It computes in float32."""
    if torch.float64 in (value.dtype, grad.dtype):
        return "needs float32 values, got float64"
    return None

"""GELU, as torch defines it; its kernels compute in float32 and round once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """See `mcore_kernels.protocols.GeluOp`; ValueError for another `approximate`."""
    check_approximate(approximate)
    return F.gelu(x, approximate=approximate)


def check_approximate(approximate: str) -> None:
    """ValueError unless it is a formula that torch has."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate is 'none' or 'tanh', got {approximate!r}")

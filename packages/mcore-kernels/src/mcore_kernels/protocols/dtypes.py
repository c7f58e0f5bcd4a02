"""In which dtype operators compute."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an operator computes: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype: itself, untouched, when it has that dtype already.

    What the forward of an autograd function returns must be a fresh result. When it is the very
    tensor that an in-place operator, or a `to` with nothing to do, handed back, torch.compile of
    torch 2.11 loses the gradient without a word.
    """
    return x if x.dtype == dtype else x.to(dtype)

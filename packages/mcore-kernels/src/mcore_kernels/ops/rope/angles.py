"""Angles of the rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cos_sin(
    positions: Tensor, rotary_dim: int, *, base: float = 10_000.0
) -> tuple[Tensor, Tensor]:
    """Return float32 `(cos, sin)`, both [T, R/2], of the angles position · base^(-2i/R).

    Angles are taken in float64: in float32 those of position 100,000 are off by up to 0.004.

    Args:
        positions: [T], integers in any order, repeats allowed (packed documents, decoding).
        rotary_dim: R, how many elements of a head turn; even.
        base: the longest wavelength is 2π · base^((R-2)/R) tokens.

    Raises:
        ValueError: R is not even and positive, or base is not positive.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            f"rope: rotary_dim turns pairs, so it is even and positive; got {rotary_dim}, "
            f"nearest {max(2, rotary_dim + 1)}"
        )
    if base <= 0:
        raise ValueError(f"rope: base must be positive, got {base}")
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    frequency = base ** (-exponent / rotary_dim)
    angle = torch.outer(positions.to(torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()

"""Formats of few bits (Micikevicius et al. 2022, arXiv:2209.05433; OCP Microscaling 1.0)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of few bits.

    Attributes:
        name: such as "e4m3".
        dtype: the torch dtype of its numbers.
        maximum: the largest finite number.
        exponent: the exponent of that number.
    """

    name: str
    dtype: torch.dtype
    maximum: float
    exponent: int

    def encode(self, x: Tensor) -> Tensor:
        """Round float32 numbers to the nearest, ties to even; what is too large is the largest.

        NaN stays NaN. Not for formats of less than a byte.
        """
        return x.clamp(-self.maximum, self.maximum).to(self.dtype)


E4M3 = Format(name="e4m3", dtype=torch.float8_e4m3fn, maximum=448.0, exponent=8)
E5M2 = Format(name="e5m2", dtype=torch.float8_e5m2, maximum=57344.0, exponent=15)
E2M1 = Format(name="e2m1", dtype=torch.float4_e2m1fn_x2, maximum=6.0, exponent=2)
FORMATS = {one.name: one for one in (E4M3, E5M2)}
"""The formats of one byte by name."""


def encode_e2m1(x: Tensor) -> Tensor:
    """Round float32 numbers to codes 0 … 15 of E2M1, uint8: a sign bit, two of exponent, one more.

    Nearest, ties to even; what is too large is the largest. The format has no NaN: NaN becomes the
    largest, with its sign.
    """
    size = x.abs().nan_to_num(nan=6.0).clamp_(max=6.0)
    # Steps of a half below 2, of 1 below 4, of 2 above; an even multiple has an even code.
    code = torch.where(
        size < 2.0,
        (size * 2.0).round(),
        torch.where(size < 4.0, size.round() + 2.0, (size * 0.5).round() + 4.0),
    )
    return code.to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """The float32 numbers of E2M1 codes."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*values, *(-x for x in values)], device=codes.device)
    return table[codes.to(torch.int64)]

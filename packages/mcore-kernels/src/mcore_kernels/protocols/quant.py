"""Operators of products in formats of 8 bits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import Block


class QuantizeOp(Protocol):
    """Numbers of 8 bits, with a scale for each block of a matrix (`mcore_kernels.quant`)."""

    def __call__(
        self,
        x: Tensor,
        fmt: Format,
        block: Block = (0, 0),
        *,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return `(data [R, C], scale)` of x [R, C]: x ≈ data · scale, `scale` float32 per block.

        `block` is (rows, columns), 0 for all. A number is x · (1 / scale) in float32, rounded to
        nearest, ties to even; beyond the format it is the largest. `scale` [1, 1] is used as it
        is (the block is the tensor); else it comes from the largest value of each block
        (`scale_of`). A NaN stays NaN and makes the scale of its block NaN.
        """

    def both(
        self,
        x: Tensor,
        fmt: Format,
        block: Block = (0, 0),
        *,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the pair of x [R, C], and that of xᵀ: data [C, R] and its scales, in one pass."""


class Fp8MatmulOp(Protocol):
    """The product of two matrices of numbers of 8 bits, both lying along what is summed."""

    def __call__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        *,
        a_block: Block,
        b_block: Block,
        dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:
        """Return `a bᵀ` [M, N] of the tensors that a [M, K], b [N, K] and their scales stand for.

        Sums are kept in float32 and rounded once to `dtype`. Tensor cores that multiply such
        numbers sum with fewer bits themselves (about 14 on Hopper): no more than 128 products at a
        time, unless `fast` allows it throughout.
        """

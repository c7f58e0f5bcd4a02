"""Operators of products in formats of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

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

    def amax(self, x: Tensor) -> Tensor:
        """Return the largest absolute value of x [R, C], float32 [1]; a NaN makes it NaN."""


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


Numbers: TypeAlias = tuple[Tensor, Tensor]
"""Numbers of 8 bits, and their scales."""
Counts: TypeAlias = Sequence[int] | Tensor
"""How many rows each expert has; a tensor [E] may lie on the device."""


class Fp8GroupedOp(Protocol):
    """Products per expert in numbers of 8 bits: `counts[i]` rows with the weight of expert i.

    Rows [R, C] are sorted by expert, weights [E, O, I] stacked; every expert's part is encoded as a
    matrix by itself, with `scale` [E] or by what `QuantizeOp` finds. Along, numbers lie as the
    tensor does. Across, those of weights are [E, I, O], and those of rows [C, P], in which an
    expert's rows begin at a multiple of 128 and end with zeros (P: counts rounded up so, summed, or
    more). Their scales, float32, of a tensor, of rows, of blocks:

        rows along       [E, 1]      [R, 1]      [R, C / 128]
        rows across      [E, 1]      [C, E]      [C, P / 128]
        weights along    [E, 1, 1]   [E, O, 1]   [E, O / 128, I / 128]
        weights across   [E, 1, 1]   [E, I, 1]   [E, I / 128, O / 128]

    Blocks are (0, 0), (1, 0), of rows (1, 128), and of weights (128, 128).
    """

    def amax(self, x: Tensor, counts: Counts | None) -> Tensor:
        """The largest absolute value of each expert's rows, or (counts None) weight: float32 [E].

        0 of an expert without rows; a NaN makes it NaN.
        """

    def encode(
        self,
        x: Tensor,
        counts: Counts | None,
        fmt: Format,
        block: Block,
        *,
        along: bool = True,
        across: bool = True,
        scale: Tensor | None = None,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> tuple[Numbers | None, Numbers | None]:
        """Return rows, or (counts None) weights, along and across; None where not wanted."""

    def product(
        self,
        x: Numbers,
        weight: Numbers,
        counts: Counts,
        *,
        x_block: Block,
        weight_block: Block,
        dtype: torch.dtype,
        fast: bool = False,
    ) -> Tensor:
        """Return `x_i weight_iᵀ` [R, N] of rows along [R, K] and weights [E, N, K] along them.

        `fast` as in `Fp8MatmulOp`.
        """

    def weight_grad(
        self, dy: Numbers, x: Numbers, counts: Counts, *, block: Block, out: Tensor
    ) -> None:
        """Add `dy_iᵀ x_i` to `out` [E, O, I]: rows across, dy [O, P] and x [I, P]."""

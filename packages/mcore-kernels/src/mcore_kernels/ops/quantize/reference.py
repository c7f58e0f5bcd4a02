"""Quantisation in plain torch. Shapes: R rows, C columns."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.quant.formats import Format
from mcore_kernels.quant.scaling import Block, block_amax, scale_of, spread


class ReferenceQuantize:
    """`mcore_kernels.protocols.QuantizeOp` in plain torch."""

    @torch.no_grad()
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
        """See `QuantizeOp`."""
        if scale is None:
            amax = block_amax(x, block)
            scale = scale_of(amax, fmt, margin=margin, power_of_two=power_of_two)
        elif block != (0, 0):
            raise ValueError(f"quantize: a given scale is one of the tensor, the block is {block}")
        inverse = spread(1.0 / scale, x.shape, block)
        return fmt.encode(x.float() * inverse).contiguous(), scale.view(scale.shape)

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
        """See `QuantizeOp`."""
        options = {"scale": scale, "margin": margin, "power_of_two": power_of_two}
        across = self(x.t(), fmt, block, **options)  # type: ignore[arg-type]
        return *self(x, fmt, block, **options), *across  # type: ignore[arg-type]

    @torch.no_grad()
    def amax(self, x: Tensor) -> Tensor:
        """See `QuantizeOp`."""
        return block_amax(x, (0, 0)).view(1)


QUANTIZE = ReferenceQuantize()
"""The operator; it holds no state."""

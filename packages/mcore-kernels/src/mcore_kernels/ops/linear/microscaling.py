"""Linear in the block formats of Blackwell, emulated anywhere by products of rounded factors.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.quant.microscaling import (
    MXFP8,
    NVFP4,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from mcore_kernels.quant.recipe import MicroscalingRecipe
from mcore_kernels.target import Target


class MicroscalingLinear:
    """`mcore_kernels.protocols.LinearOp` in MXFP8 or NVFP4, blocks along what is summed.

    Every factor is rounded to the format and multiplied in float32: the numerics of such a product,
    not its speed. Sizes that no block divides are filled up with zeros.

    Raises:
        ValueError: the target is a CUDA device and `emulate` is not set.
    """

    amax_reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, recipe: MicroscalingRecipe, target: Target | None = None, *, emulate: bool = False
    ) -> None:
        """`emulate` allows the emulation on a GPU too; on CPU there is nothing else."""
        target = target or Target()
        reason = None if emulate else recipe.refusal(target)
        if reason is not None:
            raise ValueError(f"microscaling linear: cannot run on {target.describe()}: {reason}")
        self.recipe = recipe

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        y = _Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        return self._product(x, weight).to(x.dtype)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        return self._product(dy, weight.t()).to(dy.dtype)

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        product = self._product(dy.t(), x.t())
        if out is None:
            return product.to(x.dtype)
        with torch.no_grad():
            return out.add_(product)

    def rounded(self, x: Tensor) -> Tensor:
        """What x [R, C] is after rounding to the format, float32."""
        size = MXFP8 if self.recipe.format == "mxfp8" else NVFP4
        columns = x.shape[1]
        x = torch.nn.functional.pad(x.detach().float(), (0, -columns % size))
        if self.recipe.format == "mxfp8":
            return mxfp8_dequantize(mxfp8_quantize(x))[:, :columns]
        return nvfp4_dequantize(nvfp4_quantize(x))[:, :columns]

    @torch.no_grad()
    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return self.rounded(a) @ self.rounded(b).t()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, op: MicroscalingLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.op = op
        return op.forward(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, _ = ctx.needs_input_grad
        dx = ctx.op.input_grad(grads[0], weight) if needs_x else None
        return dx, ctx.op.weight_grad(grads[0], x) if needs_w else None, None

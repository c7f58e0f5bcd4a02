"""Linear whose three products are taken in 8 bits.

Shapes: T tokens, I input features, O output features. What a product sums over lies along the rows
of both factors: y = x Wᵀ over I, dx = dy (Wᵀ)ᵀ over O, dW = dyᵀ (xᵀ)ᵀ over T. So each of x, W and
dy is needed both ways, and the forward keeps the transposed numbers, a byte each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_kernels.protocols.quant import Fp8MatmulOp, QuantizeOp
from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.quant.scaling import DelayedScale, block_amax, scale_of
from mcore_kernels.registry import resolve
from mcore_kernels.target import Target

ROLES = ("input", "weight", "grad")

Pair = tuple[Tensor, Tensor]


class Fp8Linear:
    """`mcore_kernels.protocols.LinearOp` in 8 bits, for one layer.

    Its methods and its call give the same numbers. Scales of whole tensors go through
    `amax_reduce`; those of rows and blocks are local to the factor that a rank holds.

    Attributes:
        recipe: formats and scales.
        amax_reduce: see `LinearOp`; called with one number.
        delayed: for a recipe with a history, a `DelayedScale` for each of `ROLES`. They record
            while products are taken; `advance` ends the step.

    Raises:
        ValueError: the recipe cannot run on the target and `emulate` is not set.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        target: Target | None = None,
        *,
        emulate: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """`target` chooses the kernels; `emulate` takes plain torch; `device` is of the history."""
        target = target or Target()
        reason = None if emulate else recipe.refusal(target)
        if reason is not None:
            raise ValueError(f"fp8 linear: cannot run on {target.describe()}: {reason}")
        self.recipe = recipe
        self.amax_reduce: Callable[[Tensor], Tensor] | None = None
        choice = "reference" if emulate else None
        self._quantize: QuantizeOp = resolve("quantize", target=target, require=choice)
        self._matmul: Fp8MatmulOp = resolve("fp8_matmul", target=target, require=choice)
        self.delayed: dict[str, DelayedScale] = {}
        if recipe.history:
            where = target.device_type if device is None else device
            self.delayed = {role: DelayedScale.fresh(recipe.history, where) for role in ROLES}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        y = _Fp8Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        a, b = self._along("input", x), self._along("weight", weight)
        return self._product(a, b, ("input", "weight"), x.dtype, fast=True)

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        a, b = self._along("grad", dy), self._along("weight", weight.t())
        return self._product(a, b, ("grad", "weight"), dy.dtype)

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        return self._weight_grad(
            self._along("grad", dy.t()), self._along("input", x.t()), x.dtype, out
        )

    def advance(self) -> None:
        """End a step: what was recorded in it now counts for the scales."""
        for one in self.delayed.values():
            one.advance()

    def both(self, role: str, x: Tensor) -> tuple[Pair, Pair]:
        """The numbers and scales of x, and of its transpose."""
        y, s, yt, st = self._quantize.both(
            x.detach(), self.recipe.format(role), self.recipe.block(role), **self._scales(role, x)
        )
        return (y, s), (yt, st)

    def _along(self, role: str, x: Tensor) -> Pair:
        return self._quantize(
            x.detach(), self.recipe.format(role), self.recipe.block(role), **self._scales(role, x)
        )

    @torch.no_grad()
    def _scales(self, role: str, x: Tensor) -> dict[str, Any]:
        recipe, fmt = self.recipe, self.recipe.format(role)
        options = {"margin": recipe.margin, "power_of_two": recipe.power_of_two}
        if recipe.scaling != "tensor":
            return options
        amax = block_amax(x, (0, 0)).view(1)
        if self.amax_reduce is not None:
            amax = self.amax_reduce(amax)
        if role in self.delayed:
            self.delayed[role].record(amax)
            scale = self.delayed[role].scale(
                fmt, latest=recipe.latest, margin=recipe.margin, power_of_two=recipe.power_of_two
            )
        else:
            scale = scale_of(
                amax, fmt, margin=recipe.margin, power_of_two=recipe.power_of_two
            ).view(1, 1)
        return {"scale": scale}

    def _product(
        self, a: Pair, b: Pair, roles: tuple[str, str], dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor:
        blocks = [self.recipe.block(role) for role in roles]
        return self._matmul(*a, *b, a_block=blocks[0], b_block=blocks[1], dtype=dtype, fast=fast)

    def _weight_grad(self, a: Pair, b: Pair, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        if out is None:
            return self._product(a, b, ("grad", "input"), dtype)
        # In 16 bits every micro-batch's share would be rounded before it reaches the buffer.
        with torch.no_grad():
            return out.add_(self._product(a, b, ("grad", "input"), torch.float32))


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, op: Fp8Linear) -> Tensor:
        needs_x, needs_w, _ = ctx.needs_input_grad
        (a, at) = op.both("input", x) if needs_w else (op._along("input", x), (None, None))
        (b, bt) = (
            op.both("weight", weight) if needs_x else (op._along("weight", weight), (None, None))
        )
        ctx.save_for_backward(*at, *bt)
        ctx.op, ctx.dtype = op, weight.dtype
        return op._product(a, b, ("input", "weight"), x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        op, dy = ctx.op, grads[0]
        dx = dw = None
        along, across = op.both("grad", dy)
        if weight is not None:
            dx = op._product(along, (weight, weight_scale), ("grad", "weight"), dy.dtype)
        if x is not None:
            dw = op._weight_grad(across, (x, x_scale), ctx.dtype, None)
        return dx, dw, None

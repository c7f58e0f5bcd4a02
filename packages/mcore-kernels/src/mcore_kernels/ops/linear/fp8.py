"""Linear whose three products are taken in 8 bits.

Shapes: T tokens, I input features, O output features. What a product sums over lies along the rows
of both factors: y = x Wᵀ over I, dx = dy (Wᵀ)ᵀ over O, dW = dyᵀ (xᵀ)ᵀ over T. So each of x, W and
dy is needed both ways, and the forward keeps the transposed numbers, a byte each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.linear.fp8_state import ROLES, Fp8State, Pair, Ways, there
from mcore_kernels.protocols.quant import Fp8MatmulOp, QuantizeOp
from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.registry import resolve
from mcore_kernels.target import Target

__all__ = ["ROLES", "Fp8Linear"]


class Fp8Linear(Fp8State):
    """`mcore_kernels.protocols.LinearOp` in 8 bits, for one layer.

    Its methods and its call give the same numbers. Scales of whole tensors go through
    `amax_reduce`; those of rows and blocks are local to the factor that a rank holds. Who puts
    communication between the products turns each factor into numbers once (`encode`), and
    multiplies these (`output`, `input_gradient`, `weight_gradient`).

    Attributes are those of `Fp8State`; `amax_reduce` is called with one number, and the history is
    [3, steps + 1].

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
        quantize: QuantizeOp | None = None,
        matmul: Fp8MatmulOp | None = None,
        history: Tensor | None = None,
        keeps_weight: bool = False,
    ) -> None:
        """Prepare for one layer.

        Args:
            recipe: formats and scales.
            target: chooses the kernels.
            emulate: take plain torch, anywhere.
            device: of the history.
            quantize, matmul: operators in place of those that the target chooses.
            history: memory for the history, zeros, in place of its own.
            keeps_weight: keep the numbers of the weight until it changes: `forget_weight` says so,
                for changes that torch does not see (it sees those of the tensor itself).
        """
        target = target or Target()
        super().__init__(
            recipe,
            target,
            name="fp8 linear",
            emulate=emulate,
            groups=(),
            device=device,
            history=history,
            keeps_weight=keeps_weight,
        )
        choice = "reference" if emulate else None
        self._quantize: QuantizeOp = (
            resolve("quantize", target=target, require=choice) if quantize is None else quantize
        )
        self._matmul: Fp8MatmulOp = (
            resolve("fp8_matmul", target=target, require=choice) if matmul is None else matmul
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`. A history records only where a graph is recorded too."""
        learn = torch.is_grad_enabled()
        y = _Fp8Linear.apply(x, weight, self, learn)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias  # type: ignore[no-any-return]

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        return self.output(
            there(self.encode("input", x, across=False)[0]), self._weight_along(weight), x.dtype
        )

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        _, across = self.encode("weight", weight, along=False)
        along, _ = self.encode("grad", dy, across=False)
        return self.input_gradient(there(along), there(across), dy.dtype)

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        _, dyt = self.encode("grad", dy, along=False)
        _, xt = self.encode("input", x, along=False)
        return self.weight_gradient(there(dyt), there(xt), x.dtype, out)

    # --- factors, and products of them --------------------------------------------------------

    def encode(
        self,
        role: str,
        x: Tensor,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
        like: Pair | None = None,
    ) -> Ways:
        """The numbers and scales of x [R, C], and of its transpose.

        Args:
            role: one of `ROLES`.
            x: the factor.
            along, across: which of the two are wanted.
            learn: record in the history, if there is one. Of a weight that is always done: it is
                what it is, whoever looks.
            like: numbers of the same factor of this step (of all of it or, where the scales are
                those of tensors, of x alone): what is found again has the same scales, and nothing
                is sent or recorded.
        """
        if role == "weight" and self._keeps_weight:
            return self._kept_weight(x, lambda: self._encode(role, x, self._found(role, x, learn)))
        if like is not None and self.recipe.scaling == "tensor":
            scales: dict[str, Any] = {"scale": like[1]}
        else:
            scales = self._found(role, x, learn)
        return self._encode(role, x, scales, along=along, across=across)

    def output(self, x: Pair, weight: Pair, dtype: torch.dtype) -> Tensor:
        """Return `x weightᵀ` [T, O] of x along, and the weight along."""
        return self._product(x, weight, ("input", "weight"), dtype, fast=True)

    def input_gradient(self, dy: Pair, weight: Pair, dtype: torch.dtype) -> Tensor:
        """Return `dy weight` [T, I] of dy along, and the weight across."""
        return self._product(dy, weight, ("grad", "weight"), dtype)

    def weight_gradient(
        self, dy: Pair, x: Pair, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Return `dyᵀ x` [O, I] of dy across, and x across; with `out` it is added to that."""
        if out is None:
            return self._product(dy, x, ("grad", "input"), dtype)
        # In 16 bits every micro-batch's share would be rounded before it reaches the buffer.
        wide = torch.promote_types(out.dtype, torch.float32)
        with torch.no_grad():
            return out.add_(self._product(dy, x, ("grad", "input"), wide))

    # --- within -------------------------------------------------------------------------------

    def _weight_along(self, weight: Tensor) -> Pair:
        return there(self.encode("weight", weight, across=False)[0])

    def _encode(
        self,
        role: str,
        x: Tensor,
        scales: dict[str, Any],
        *,
        along: bool = True,
        across: bool = True,
    ) -> Ways:
        x, fmt, block = x.detach(), self.recipe.format(role), self.recipe.block(role)
        if along and across:
            y, s, yt, st = self._quantize.both(x, fmt, block, **scales)
            return (y, s), (yt, st)
        first = self._quantize(x, fmt, block, **scales) if along else None
        return first, self._quantize(x.t(), fmt, block, **scales) if across else None

    def _found(self, role: str, x: Tensor, learn: bool) -> dict[str, Any]:
        scales = self._scales(role, lambda: self._quantize.amax(x.detach()), learn)
        if "scale" in scales:
            scales["scale"] = scales["scale"].view(1, 1)
        return scales

    def _product(
        self, a: Pair, b: Pair, roles: tuple[str, str], dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor:
        blocks = [self.recipe.block(role) for role in roles]
        return self._matmul(
            a[0], a[1], b[0], b[1], a_block=blocks[0], b_block=blocks[1], dtype=dtype, fast=fast
        )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, op: Fp8Linear, learn: bool) -> Tensor:
        needs_x, needs_w = (learn and needed for needed in ctx.needs_input_grad[:2])
        a, at = op.encode("input", x, across=needs_w, learn=learn)
        b, bt = op.encode("weight", weight, across=needs_x, learn=learn)
        ctx.save_for_backward(*(at or (None, None)), *(bt or (None, None)))
        ctx.op, ctx.dtype = op, weight.dtype
        return op.output(there(a), there(b), x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        op, dy = ctx.op, grads[0]
        needs_x, needs_w = ctx.needs_input_grad[:2]
        dx = dw = None
        along, across = op.encode("grad", dy, along=needs_x, across=needs_w)
        if needs_x:
            dx = op.input_gradient(there(along), weight, dy.dtype)
        if needs_w:
            dw = op.weight_gradient(there(across), x, ctx.dtype)
        return dx, dw, None, None

"""The grouped linear operator whose three products are taken in 8 bits.

Shapes: R rows sorted by expert, E experts, I input and O output features. Every expert's factors
are encoded as those of a linear layer of its own, so that it computes the same wherever it lies.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from mcore_kernels.ops.linear.fp8_state import Fp8State, Ways, there
from mcore_kernels.protocols.quant import Counts, Fp8GroupedOp, Numbers
from mcore_kernels.quant.recipe import Fp8Recipe
from mcore_kernels.registry import resolve
from mcore_kernels.target import Target


class Fp8GroupedLinear(Fp8State):
    """`mcore_kernels.protocols.GroupedLinearOp` in 8 bits, for the experts of one layer.

    Its methods and its call give the same numbers. Who wants to know when which gradient is
    computed encodes each factor once (`encode`), and multiplies these (`output`, `input_gradient`,
    `weight_gradient`).

    Attributes are those of `Fp8State`; `amax_reduce` is called with a number for each expert, and
    the history is [3, E, steps + 1].

    Raises:
        ValueError: the recipe cannot run on the target and `emulate` is not set.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        num_experts: int,
        target: Target | None = None,
        *,
        emulate: bool = False,
        device: torch.device | str | None = None,
        op: Fp8GroupedOp | None = None,
        history: Tensor | None = None,
        keeps_weight: bool = False,
    ) -> None:
        """Prepare for `num_experts` experts.

        `op` takes the place of the operator that the target chooses; the rest as `Fp8Linear`.
        """
        target = target or Target()
        super().__init__(
            recipe,
            target,
            name="fp8 grouped linear",
            emulate=emulate,
            groups=(num_experts,),
            device=device,
            history=history,
            keeps_weight=keeps_weight,
        )
        choice = "reference" if emulate else None
        self._op: Fp8GroupedOp = (
            resolve("fp8_grouped", target=target, require=choice) if op is None else op
        )

    def __call__(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`. A history records only where a graph is recorded too."""
        learn = torch.is_grad_enabled()
        return cast(Tensor, _Fp8Grouped.apply(x, weight, counts, self, learn))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        along, _ = self.encode("input", x, counts, across=False)
        w, _ = self.encode("weight", weight, None, across=False)
        return self.output(there(along), there(w), counts, x.dtype)

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        _, w = self.encode("weight", weight, None, along=False)
        along, _ = self.encode("grad", dy, counts, across=False)
        return self.input_gradient(there(along), there(w), counts, dy.dtype)

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""
        _, dyt = self.encode("grad", dy, counts, along=False)
        _, xt = self.encode("input", x, counts, along=False)
        self.weight_gradient(there(dyt), there(xt), counts, out)

    # --- factors, and products of them --------------------------------------------------------

    def encode(
        self,
        role: str,
        x: Tensor,
        counts: Counts | None,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
    ) -> Ways:
        """The numbers and scales of rows or, counts None, of the weight; see `Fp8GroupedOp`.

        role: one of `ROLES`. learn: record in the history, if there is one; of a weight that is
        always done.
        """

        def found(along: bool, across: bool) -> Ways:
            scales = self._scales(role, lambda: self._op.amax(x.detach(), counts), learn)
            fmt, block = self.recipe.format(role), self.recipe.block(role)
            return self._op.encode(
                x.detach(), counts, fmt, block, along=along, across=across, **scales
            )

        if role == "weight" and self._keeps_weight:
            return self._kept_weight(x, lambda: found(True, True))
        return found(along, across)

    def output(
        self, x: tuple[Tensor, ...], weight: tuple[Tensor, ...], counts: Counts, dtype: torch.dtype
    ) -> Tensor:
        """Return `x_i weight_iᵀ` [R, O] of x along, and the weight along."""
        return self._product(x, weight, counts, "input", dtype, fast=True)

    def input_gradient(
        self, dy: tuple[Tensor, ...], weight: tuple[Tensor, ...], counts: Counts, dtype: torch.dtype
    ) -> Tensor:
        """Return `dy_i weight_i` [R, I] of dy along, and the weight across."""
        return self._product(dy, weight, counts, "grad", dtype)

    def weight_gradient(
        self, dy: tuple[Tensor, ...], x: tuple[Tensor, ...], counts: Counts, out: Tensor
    ) -> None:
        """Add `dy_iᵀ x_i` to `out` [E, O, I] of dy across, and x across; sums are float32.

        Into a buffer of fewer bits it is rounded once.
        """
        wide = torch.promote_types(out.dtype, torch.float32)
        buffer = out if out.dtype == wide else torch.zeros_like(out, dtype=wide)
        block = self.recipe.block("grad")
        self._op.weight_grad(cast(Numbers, dy), cast(Numbers, x), counts, block=block, out=buffer)
        if buffer is not out:
            out += buffer

    def _product(
        self,
        x: tuple[Tensor, ...],
        weight: tuple[Tensor, ...],
        counts: Counts,
        role: str,
        dtype: torch.dtype,
        *,
        fast: bool = False,
    ) -> Tensor:
        return self._op.product(
            cast(Numbers, x),
            cast(Numbers, weight),
            counts,
            x_block=self.recipe.block(role),
            weight_block=self.recipe.block("weight"),
            dtype=dtype,
            fast=fast,
        )


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- as autograd calls it
        ctx: Any, x: Tensor, weight: Tensor, counts: Counts, op: Fp8GroupedLinear, learn: bool
    ) -> Tensor:
        needs_x, needs_w = (learn and needed for needed in ctx.needs_input_grad[:2])
        a, at = op.encode("input", x, counts, across=needs_w, learn=learn)
        b, bt = op.encode("weight", weight, None, across=needs_x, learn=learn)
        ctx.save_for_backward(*(at or (None, None)), *(bt or (None, None)))
        ctx.op, ctx.counts, ctx.weight = op, counts, (weight.shape, weight.dtype)
        return op.output(there(a), there(b), counts, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        op, dy, counts = ctx.op, grads[0], ctx.counts
        needs_x, needs_w = ctx.needs_input_grad[:2]
        dx = dw = None
        along, across = op.encode("grad", dy, counts, along=needs_x, across=needs_w)
        if needs_x:
            dx = op.input_gradient(there(along), weight, counts, dy.dtype)
        if needs_w:
            dw = torch.zeros(ctx.weight[0], dtype=ctx.weight[1], device=dy.device)
            op.weight_gradient(there(across), x, counts, dw)
        return dx, dw, None, None, None

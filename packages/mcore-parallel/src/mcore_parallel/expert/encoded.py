"""The grouped linear operator over factors in a form of the operator's own: numbers of 8 bits.

R rows, sorted by expert, e experts, I input and O output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from mcore_parallel.data.main_grad import added_to_main, main_grad
from mcore_parallel.expert.rows_of import Counts, add_bias, bias_gradient
from mcore_parallel.protocols import Encoded


class EncodedGroupedOp(Protocol):
    """What a `GroupedLinearOp` has besides, if its factors take a form of its own: numbers, scales.

    Layers know it by its method `encode`. Each factor is encoded once for all products that it has
    a part in. The products are those of the methods of `GroupedLinearOp`.
    """

    def encode(
        self,
        role: str,
        x: Tensor,
        counts: Counts | None,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
    ) -> tuple[Encoded | None, Encoded | None]:
        """Return rows, or (counts None) the weight, along and across; None where not wanted.

        role and learn as `mcore_parallel.EncodedLinearOp.encode`.
        """

    def output(self, x: Encoded, weight: Encoded, counts: Counts, dtype: torch.dtype) -> Tensor:
        """Return `x_i weight_iᵀ` [R, O], a fresh tensor: both along."""

    def input_gradient(
        self, dy: Encoded, weight: Encoded, counts: Counts, dtype: torch.dtype
    ) -> Tensor:
        """Return `dy_i weight_i` [R, I], a fresh tensor: dy along, the weight across."""

    def weight_gradient(self, dy: Encoded, x: Encoded, counts: Counts, out: Tensor) -> None:
        """Add `dy_iᵀ x_i` to `out` [e, O, I], both across."""


def encoded_grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Counts, op: EncodedGroupedOp
) -> Tensor:
    """Return `x_i weight_iᵀ + bias_i` [R, O], as `grouped_linear` does.

    Kept for the backward pass: the input across its rows as it was encoded.
    """
    options = (counts, op, torch.is_grad_enabled())
    return cast(Tensor, _EncodedGrouped.apply(x, weight, bias, options))  # type: ignore[no-untyped-call]


class _EncodedGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Counts, EncodedGroupedOp, bool],
    ) -> Tensor:
        counts, op, learn = options
        need_x, need_weight = (learn and need for need in ctx.needs_input_grad[:2])
        along, across = op.encode("input", x, counts, across=need_weight, learn=learn)
        w, _ = op.encode("weight", weight, None, across=need_x, learn=learn)
        y = op.output(_there(along), _there(w), counts, x.dtype)
        add_bias(y, bias, counts)
        ctx.options = counts, op
        # The object itself, since a saved tensor need not come back as the parameter that has the
        # attributes.
        ctx.weight = weight
        # Of the weight not the encoding, which the operator may keep: where parameters are sharded
        # that would keep all of them.
        kept = _there(across) if need_weight else ()
        ctx.save_for_backward(weight if need_x else None, *kept)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        counts, op = ctx.options
        weight, *kept = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        along, across = op.encode("grad", dy, counts, along=need_x, across=need_weight)
        dx = dw = None
        deferred = getattr(ctx.weight, "deferred", None)
        if need_weight and deferred is not None and deferred.is_collecting:
            args = (op, _there(across), tuple(kept), ctx.weight, counts)
            deferred.put(ctx.weight, partial(_weight_grad, *args))
            need_weight = False
        if need_x:
            _, w = op.encode("weight", weight, None, along=False)
            dx = op.input_gradient(_there(along), _there(w), counts, dy.dtype)
        if need_weight:
            dw = _weight_grad(op, _there(across), tuple(kept), ctx.weight, counts)
        return dx, dw, bias_gradient(dy, counts) if need_bias else None, None


def _weight_grad(
    op: EncodedGroupedOp, dy: Encoded, x: Encoded, weight: Any, counts: Counts
) -> Tensor:
    if getattr(weight, "main_grad", None) is None:
        dw = torch.zeros_like(weight, requires_grad=False)
        op.weight_gradient(dy, x, counts, dw)
        return dw
    op.weight_gradient(dy, x, counts, main_grad(weight))
    return added_to_main(weight)


def _there(encoded: Encoded | None) -> Encoded:
    assert encoded is not None
    return encoded

"""Activations in plain torch: only the arguments are kept for the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.glu.formulas import FORMULAS, check_activation
from mcore_kernels.ops.glu.reference import bias_grad, check_weights
from mcore_kernels.protocols import accumulation_dtype, rounded


def activation(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "gelu",
    weights: Tensor | None = None,
) -> Tensor:
    """See `mcore_kernels.protocols.ActivationOp`; ValueError for an unknown name."""
    check_activation("activation", activation)
    check_weights("activation", x, weights)
    return _Activation.apply(x, bias, weights, activation)  # type: ignore[no-untyped-call,no-any-return]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weights: Tensor | None, name: str
    ) -> Tensor:
        ctx.save_for_backward(x, bias, weights)
        ctx.name = name
        y = FORMULAS[name][0](_biased(x, bias))
        return rounded(y if weights is None else y * weights.unsqueeze(-1), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weights = ctx.saved_tensors
        value, slope = FORMULAS[ctx.name]
        wide = _biased(x, bias)
        dy = grads[0].to(wide.dtype)
        dweights = None
        if weights is not None:
            dweights = (dy * value(wide)).sum(-1).to(weights.dtype)
            dy = dy * weights.unsqueeze(-1)
        dx = dy * slope(wide)
        return dx.to(x.dtype), bias_grad(dx, bias), dweights, None


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    return wide if bias is None else wide + bias

"""Gated and plain activations in plain torch: only the arguments are kept for the backward.

Shapes: F feed-forward; "…" rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore_kernels.ops.glu.formulas import FORMULAS, check_activation
from mcore_kernels.protocols import accumulation_dtype, rounded


def glu(
    gate_up: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    offset: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """See `mcore_kernels.protocols.GluOp`; ValueError for an odd size or an unknown name."""
    check_glu(gate_up, activation, limit, weights)
    options = (activation, limit, offset)
    return _Glu.apply(gate_up, bias, weights, options)  # type: ignore[no-untyped-call,no-any-return]


def check_glu(
    gate_up: Tensor, activation: str, limit: float | None, weights: Tensor | None
) -> None:
    """ValueError unless these arguments of `glu` make sense."""
    check_activation("glu", activation)
    size = gate_up.shape[-1]
    if size % 2:
        raise ValueError(
            f"glu: the last dim holds gate and up, so it is even; got {size}, nearest "
            f"{size - 1} or {size + 1}"
        )
    if limit is not None and not limit > 0:
        raise ValueError(f"glu: limit must be positive, got {limit}")
    check_weights("glu", gate_up, weights)


def check_weights(op: str, x: Tensor, weights: Tensor | None) -> None:
    """ValueError unless there is one weight per row of x."""
    if weights is not None and weights.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: weights are one per row, {tuple(x.shape[:-1])}, got {tuple(weights.shape)}"
        )


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        options: tuple[str, float | None, float],
    ) -> Tensor:
        ctx.save_for_backward(gate_up, bias, weights)
        ctx.options = options
        activation, limit, offset = options
        gate, up = _halves(gate_up, bias, limit)
        y = FORMULAS[activation][0](gate) * (up + offset)
        if weights is not None:
            y = y * weights.unsqueeze(-1)
        return rounded(y, gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, bias, weights = ctx.saved_tensors
        activation, limit, offset = ctx.options
        value, slope = FORMULAS[activation]
        gate, up = _halves(gate_up, bias, None)
        dy = grads[0].to(gate.dtype)
        inside = None
        if limit is not None:
            inside = torch.cat((gate <= limit, up.abs() <= limit), dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        y, up = value(gate), up + offset
        dweights = None
        if weights is not None:
            dweights = (dy * y * up).sum(-1).to(weights.dtype)
            dy = dy * weights.unsqueeze(-1)
        dx = torch.cat((dy * up * slope(gate), dy * y), dim=-1)
        if inside is not None:
            dx = torch.where(inside, dx, 0.0)
        return dx.to(gate_up.dtype), bias_grad(dx, bias), dweights, None


def _halves(gate_up: Tensor, bias: Tensor | None, limit: float | None) -> tuple[Tensor, Tensor]:
    wide = gate_up.to(accumulation_dtype(gate_up.dtype))
    gate, up = (wide if bias is None else wide + bias).chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def bias_grad(dx: Tensor, bias: Tensor | None) -> Tensor | None:
    """The gradient of what was added to every row, summed in the accumulation dtype."""
    if bias is None:
        return None
    wide = accumulation_dtype(dx.dtype)
    return dx.reshape(-1, dx.shape[-1]).sum(0, dtype=wide).to(bias.dtype)

"""The grouped linear operator where a compiler traces: how many rows there are it reads at run.

R rows sorted by expert, E experts, I input and O output features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary
from mcore_kernels.implementation import load_attribute

if TYPE_CHECKING:
    from mcore_kernels.ops.grouped_linear.base import Counts
    from mcore_kernels.ops.grouped_linear.reference import ReferenceGroupedLinear


def traced(op: ReferenceGroupedLinear, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
    """What `op` makes of these, as one operator of torch each way."""
    if not isinstance(counts, Tensor):
        counts = torch.tensor(list(counts))
    y: Tensor = _forward_op(x, weight, counts, _path(op), _path(op.linear))
    return y


def _path(one: object) -> str:
    return f"{type(one).__module__}:{type(one).__qualname__}"


def _made(path: str, linear: str) -> ReferenceGroupedLinear:
    op: ReferenceGroupedLinear = load_attribute(path)(load_attribute(linear)())
    return op


def _forward(x: Tensor, weight: Tensor, counts: Tensor, path: str, linear: str) -> Tensor:
    return _made(path, linear).forward(x, weight, counts)


def _forward_fake(x: Tensor, weight: Tensor, counts: Tensor, path: str, linear: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _backward(  # noqa: PLR0917 -- the operator's arguments, in their order
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    path: str,
    linear: str,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients that are wanted; empty ones in place of others."""
    op = _made(path, linear)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    if wants_x:
        dx = op.input_grad(dy, weight, counts)
    if wants_weight:
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        op.weight_grad(dy, x, counts, total)
        dw = total.to(weight.dtype)
    return dx, dw


def _backward_fake(  # noqa: PLR0917 -- as `_backward`
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    path: str,
    linear: str,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape if wants_x else (0,))
    return dx, weight.new_empty(weight.shape if wants_weight else (0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, counts, *ctx.paths = inputs
    ctx.save_for_backward(x, weight, counts)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    dx, dw = _backward_op(dy, *ctx.saved_tensors, *ctx.paths, wants_x, wants_weight)
    return dx if wants_x else None, dw if wants_weight else None, None, None, None


_LIBRARY = OpLibrary()
_forward_op = _LIBRARY.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor counts, str path, str linear) -> Tensor",
    _forward,
    fake=_forward_fake,
)
_backward_op = _LIBRARY.define(
    "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor counts, str path, "
    "str linear, bool wants_x, bool wants_weight) -> (Tensor, Tensor)",
    _backward,
    fake=_backward_fake,
)
_LIBRARY.differentiate("grouped_linear", _gradients, keep=_keep)

"""The linear operator over factors in a form of the operator's own, such as numbers of 8 bits.

T tokens (all of the group's), I input features, O local output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather
from mcore_parallel.data.main_grad import added_to_main, main_grad
from mcore_parallel.group import Group
from mcore_parallel.pipeline.weights import DeferredGradients
from mcore_parallel.protocols import Encoded, EncodedLinearOp
from mcore_parallel.tensor.overlap import start_gather, start_reduction


@dataclass(frozen=True, kw_only=True)
class EncodedOptions:
    """What `encoded_linear` does besides the products; see `parallel_linear`.

    parameter: whose `main_grad` takes the gradient. learn: see `EncodedLinearOp.encode`.
    """

    linear: EncodedLinearOp
    group: Group
    sequence_parallel: bool
    parameter: Any
    deferred: DeferredGradients | None
    learn: bool

    @property
    def gathers(self) -> bool:
        """Whether the rows of the input come from several ranks."""
        return self.sequence_parallel and self.group.size > 1


def encoded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: EncodedOptions
) -> Tensor:
    """Return `x weightᵀ + bias`, as `parallel_linear` does: x [T, I], or my rows of it.

    Kept for the backward pass: the input across its rows as it was encoded; where rows are gathered
    it is my rows as they came, which are gathered and encoded again.
    """
    return cast(Tensor, _EncodedLinear.apply(x, weight, bias, options))  # type: ignore[no-untyped-call]


class _EncodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: EncodedOptions
    ) -> Tensor:
        linear, gathers = options.linear, options.gathers
        need_x, need_weight = (options.learn and need for need in ctx.needs_input_grad[:2])
        full = all_gather(x, options.group) if gathers else x
        along, across = linear.encode(
            "input", full, across=need_weight and not gathers, learn=options.learn
        )
        w, _ = linear.encode("weight", weight, across=need_x, learn=options.learn)
        y = linear.output(_there(along), _there(w), x.dtype)
        if bias is not None:
            y.add_(bias)
        kept: tuple[Tensor, ...] = ()
        if need_weight:
            # Of what lies along only the scales are asked for, and numbers would be kept for it.
            kept = (x, *_there(along)[1:]) if gathers else _there(across)
        ctx.options, ctx.dtype = options, weight.dtype
        # With the parameter itself, since a saved tensor need not come back as the object that has
        # the attributes.
        ctx.weight = weight if options.deferred is not None else None
        # Of the weight not the encoding, which the operator may keep: where parameters are sharded
        # that would keep all of them.
        ctx.save_for_backward(weight if need_x else None, *kept)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        options: EncodedOptions = ctx.options
        linear, deferred, group = options.linear, options.deferred, options.group
        weight, *kept = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        # What is sent for scales goes before the rest, which would hold it up.
        along, across = linear.encode("grad", dy, along=need_x, across=need_weight)
        w = linear.encode("weight", weight, along=False)[1] if need_x else None
        full, gathering, reducing = None, None, None
        later = need_weight and deferred is not None and deferred.is_collecting
        if later:
            assert deferred is not None
            compute = partial(_weight_grad_later, options, _there(across), kept, ctx.dtype)
            deferred.put(ctx.weight, compute)
        elif need_weight and options.gathers:
            full, gathering = start_gather(kept[0], group)
        dx = dw = None
        if need_x:
            dx = linear.input_gradient(_there(along), _there(w), dy.dtype)
            dx, reducing = start_reduction(dx, group, options.sequence_parallel)
        if gathering is not None:
            gathering.wait()
        if need_weight and not later:
            dw = _weight_grad(options, _there(across), kept, full, ctx.dtype)
        db = dy.sum(0) if need_bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None


def _weight_grad_later(
    options: EncodedOptions, dy: Encoded, kept: list[Tensor], dtype: torch.dtype
) -> Tensor:
    full = all_gather(kept[0], options.group) if options.gathers else None
    return _weight_grad(options, dy, kept, full, dtype)


def _weight_grad(
    options: EncodedOptions,
    dy: Encoded,
    kept: list[Tensor],
    full: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the weight from what was kept; `full`: all rows, where they are gathered."""
    linear, x = options.linear, tuple(kept)
    if full is not None:
        x = _there(linear.encode("input", full, along=False, like=tuple(kept))[1])
    if options.parameter is None:
        return linear.weight_gradient(dy, x, dtype)
    linear.weight_gradient(dy, x, dtype, out=main_grad(options.parameter))
    return added_to_main(options.parameter)


def _there(encoded: Encoded | None) -> Encoded:
    assert encoded is not None
    return encoded

"""The linear operator whose input gradient is communicated while the weight gradient is computed.

T tokens (all of the group's), I input features, O local output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mcore_parallel.collectives import all_gather
from mcore_parallel.data.main_grad import added_to_main, take_main_grad
from mcore_parallel.group import Group
from mcore_parallel.pipeline.weights import DeferredGradients
from mcore_parallel.protocols import EncodedLinearOp, LinearOp
from mcore_parallel.tensor.encoded import EncodedOptions, encoded_linear
from mcore_parallel.tensor.overlap import start_gather, start_reduction

__all__ = ["parallel_linear"]


def parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    linear: LinearOp,
    group: Group,
    sequence_parallel: bool = False,
    accumulate: bool = True,
) -> Tensor:
    """Return `x weightᵀ + bias` [T, O] where `weight` [O, I] is a shard of rows over `group`.

    x is [T, I], the same on all ranks, and its gradient is summed over the group; with
    `sequence_parallel` x is [T/size, I] (my rows), is gathered here and again in the backward (only
    my rows are kept in between), and its gradient is reduce-scattered. In the backward the gather
    runs during the input-gradient product, and the reduction during the weight-gradient product.
    Dimensions in front of the last are flattened and restored; sequence parallelism cuts the first.

    Gradients of the weight: none when it is frozen. When the weight has an attribute `main_grad`
    (and `accumulate`), its gradient is added to that buffer at the buffer's precision; the weight's
    attribute `grad_added_to_main` becomes True, and autograd is handed a tensor without meaning, so
    that hooks run and see that there is nothing to add. The first gradient of a step is written by
    the operator's method `write_weight_grad(dy, x, out)` where it has one. A weight with an
    attribute `deferred` (`pipeline.DeferredGradients`; and `accumulate`) has its gradient computed
    when that says so. A weight that other operators use too must have neither, or be passed with
    `accumulate=False`.
    """
    rows = x.reshape(-1, x.shape[-1])
    deferred = getattr(weight, "deferred", None) if accumulate else None
    accumulate = accumulate and getattr(weight, "main_grad", None) is not None
    # Not by `isinstance`, which takes a protocol 30 µs: as long as a small product.
    if getattr(linear, "encode", None) is not None:
        encoded = EncodedOptions(
            linear=cast(EncodedLinearOp, linear),
            group=group,
            sequence_parallel=sequence_parallel,
            parameter=weight if accumulate else None,
            deferred=deferred,
            learn=torch.is_grad_enabled(),
        )
        y = encoded_linear(rows, weight, bias, encoded)
    elif group.size == 1 and not accumulate and deferred is None:
        y = linear(rows, weight, bias)
    else:
        options = (linear, group, sequence_parallel, weight if accumulate else None, deferred)
        y = cast(Tensor, _ParallelLinear.apply(rows, weight, bias, options))  # type: ignore[no-untyped-call]
    if x.dim() == 2:
        return y
    first = x.shape[0] * (group.size if sequence_parallel else 1)
    return y.reshape(first, *x.shape[1:-1], y.shape[-1]) if x.dim() > 1 else y.reshape(-1)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[LinearOp, Group, bool, Any, DeferredGradients | None],
    ) -> Tensor:
        linear, group, sequence_parallel, _, deferred = options
        y = linear.forward(all_gather(x, group) if sequence_parallel else x, weight)
        if bias is not None:
            y.add_(bias)
        # With the parameter itself, since a saved tensor need not come back as the object that has
        # the attributes.
        ctx.options = options
        ctx.weight = weight if deferred is not None else None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        linear, group, sequence_parallel, parameter, deferred = ctx.options
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        gathering, reducing = None, None
        if need_weight and deferred is not None and deferred.is_collecting:
            gathered = group if sequence_parallel else None
            later = partial(_weight_grad_later, linear, dy, x, parameter, gathered)
            deferred.put(ctx.weight, later)
            need_weight = False
        if need_weight and sequence_parallel and group.size > 1:
            x, gathering = start_gather(x, group)
        dx = None
        if need_x:
            dx = linear.input_grad(dy, weight)
            dx, reducing = start_reduction(dx, group, sequence_parallel)
        if gathering is not None:
            gathering.wait()
        dw = _weight_grad(linear, dy, x, parameter) if need_weight else None
        db = dy.sum(0) if need_bias else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None


def _weight_grad_later(
    linear: LinearOp, dy: Tensor, x: Tensor, parameter: Any, group: Group | None
) -> Tensor:
    return _weight_grad(linear, dy, x if group is None else all_gather(x, group), parameter)


def _weight_grad(linear: LinearOp, dy: Tensor, x: Tensor, parameter: Any) -> Tensor:
    if parameter is None:
        return linear.weight_grad(dy, x)
    buffer, blank = take_main_grad(parameter)
    write = getattr(linear, "write_weight_grad", None)
    if blank and write is not None:
        write(dy, x, buffer)
    else:
        linear.weight_grad(dy, x, out=buffer.zero_() if blank else buffer)
    return added_to_main(parameter)

"""The linear operator of many experts: each has its own weight, and its own number of rows.

R rows, sorted by expert, e experts, I input and O output features.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from mcore_parallel.data.main_grad import take_main_grad
from mcore_parallel.expert.encoded import EncodedGroupedOp, encoded_grouped
from mcore_parallel.expert.rows_of import Counts, add_bias, bias_gradient, rows_of
from mcore_parallel.protocols import LinearOp, TorchLinear

__all__ = ["GroupedLinearOp", "SequentialLinear", "grouped_linear"]


class GroupedLinearOp(Protocol):
    """The products of a grouped GEMM: rows `counts[i]` of x with weight i, for all i.

    None of them records autograd; results are fresh tensors. An expert without rows contributes
    nothing. Counts may be a tensor [e] on the device of the rows.
    """

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """Return `x_i weight_iᵀ`: x [R, I], weight [e, O, I] → [R, O]."""

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """Return `dy_i weight_i`: dy [R, O], weight [e, O, I] → [R, I]."""

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """Add `dy_iᵀ x_i` to `out` [e, O, I], at the precision of `out`: dy [R, O], x [R, I]."""


class SequentialLinear:
    """`GroupedLinearOp` as one product after another, each by a `LinearOp`; counts are read."""

    def __init__(self, linear: LinearOp | None = None) -> None:
        self.linear: LinearOp = linear or TorchLinear()

    def forward(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        products = [self.linear.forward(x[rows], weight[i]) for i, rows in rows_of(counts)]
        return torch.cat(products) if products else x.new_empty(0, weight.shape[1])

    def input_grad(self, dy: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """See `GroupedLinearOp`."""
        products = [self.linear.input_grad(dy[rows], weight[i]) for i, rows in rows_of(counts)]
        return torch.cat(products) if products else dy.new_empty(0, weight.shape[2])

    def weight_grad(self, dy: Tensor, x: Tensor, counts: Counts, out: Tensor) -> None:
        """See `GroupedLinearOp`."""
        for i, rows in rows_of(counts):
            self.linear.weight_grad(dy[rows], x[rows], out=out[i])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counts: Counts,
    *,
    op: GroupedLinearOp,
) -> Tensor:
    """Return `x_i weight_iᵀ + bias_i` [R, O] for the rows of each expert, with gradients.

    x [R, I] is sorted by expert, `counts[i]` rows of expert i; weight [e, O, I], bias [e, O].
    Counts that are a tensor, on the device of x, are read back by the op alone, if it needs to, and
    that they add up to R is then left to their maker.
    A weight with the attribute `main_grad` gets its gradient added there, and one with `deferred`
    when that says so, as by `parallel_linear`; the first of a step is written by the op's method
    `write_weight_grad(dy, x, counts, out)` where it has one. An expert without rows has a gradient
    of zero. An op with a method `encode` (`EncodedGroupedOp`) encodes each factor once.

    Raises:
        ValueError: the counts are not one for each expert, or do not add up to R.
    """
    if isinstance(counts, Tensor):
        if counts.shape != weight.shape[:1]:
            raise ValueError(
                f"grouped_linear: counts of shape {list(counts.shape)} must be "
                f"{weight.shape[0]} numbers, one for each expert"
            )
    elif len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"grouped_linear: counts {list(counts)} must be {weight.shape[0]} numbers, one for "
            f"each expert, that add up to {x.shape[0]} rows"
        )
    else:
        counts = tuple(counts)
    if getattr(op, "encode", None) is not None:
        return encoded_grouped(x, weight, bias, counts, cast(EncodedGroupedOp, op))
    options = (counts, op)
    return cast(Tensor, _GroupedLinear.apply(x, weight, bias, options))  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Counts, GroupedLinearOp],
    ) -> Tensor:
        counts, op = options
        y = op.forward(x, weight, counts)
        add_bias(y, bias, counts)
        ctx.options = options
        # The object itself, since a saved tensor need not come back as the parameter that has the
        # attributes.
        ctx.weight = weight
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        counts, op = ctx.options
        deferred = getattr(ctx.weight, "deferred", None)
        if need_weight and deferred is not None and deferred.is_collecting:
            deferred.put(ctx.weight, partial(_weight_grad, dy, x, ctx.weight, ctx.options))
            need_weight = False
        dx = op.input_grad(dy, weight, counts) if need_x else None
        dw = _weight_grad(dy, x, ctx.weight, ctx.options) if need_weight else None
        return dx, dw, bias_gradient(dy, counts) if need_bias else None, None


def _weight_grad(
    dy: Tensor, x: Tensor, weight: Any, options: tuple[Counts, GroupedLinearOp]
) -> Tensor:
    counts, op = options
    write = getattr(op, "write_weight_grad", None)
    if getattr(weight, "main_grad", None) is None:
        # Operators take a buffer of 32 bits without reading counts back, and round once.
        wide = torch.promote_types(weight.dtype, torch.float32)
        if write is None:
            dw = torch.zeros_like(weight, dtype=wide, requires_grad=False)
            op.weight_grad(dy, x, counts, dw)
        else:
            dw = torch.empty_like(weight, dtype=wide, requires_grad=False)
            write(dy, x, counts, dw)
        return dw.to(weight.dtype)
    buffer, blank = take_main_grad(weight)
    if blank and write is not None:
        write(dy, x, counts, buffer)
    else:
        op.weight_grad(dy, x, counts, buffer.zero_() if blank else buffer)
    weight.grad_added_to_main = True
    # Nobody reads it: only anomaly detection would, and mind what is in it.
    empty = torch.zeros_like if torch.is_anomaly_enabled() else torch.empty_like
    return empty(weight, requires_grad=False)

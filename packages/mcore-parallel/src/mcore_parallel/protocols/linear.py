"""Matrix products: the operator of linear layers, in plain torch and in forms of its own.

T tokens, I/O input and output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Encoded", "EncodedLinearOp", "LinearOp", "TorchLinear"]


class LinearOp(Protocol):
    """A matrix product `y = x Wᵀ (+ b)` with its three GEMMs reachable one by one.

    `__call__` is the whole operator for autograd. The tensor-parallel layers, which put
    communication between the GEMMs, and schedules that delay weight gradients use the methods;
    both ways must give the same numbers.
    """

    amax_reduce: Callable[[Tensor], Tensor] | None
    """Hook for implementations with scaling factors: given the local absolute maxima, returns
    the maxima over all ranks that share a scale. None: scales are local. Implementations without
    scaling factors never call it."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x weightᵀ + bias`: x [T, I], weight [O, I], bias [O] → [T, O]."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return `x weightᵀ` [T, O] without recording autograd; a fresh tensor."""

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return `dy weight`: dy [T, O], weight [O, I] → [T, I]; a fresh tensor."""

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `dyᵀ x`: dy [T, O], x [T, I] → [O, I].

        With `out` (any float dtype, usually a float32 gradient buffer) the product is ADDED to it
        at the precision of `out`, and `out` is returned.
        """


Encoded: TypeAlias = tuple[Tensor, ...]
"""A factor in a form of an operator's own."""


class EncodedLinearOp(LinearOp, Protocol):
    """A `LinearOp` whose factors take a form of its own, such as numbers of 8 bits and scales.

    Layers know it by its method `encode`. Each factor is encoded once for all products that it has
    a part in, and what is kept of the input for the backward pass is its encoding. The products are
    those of the methods of `LinearOp`.
    """

    def encode(
        self,
        role: str,
        x: Tensor,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
        like: Encoded | None = None,
    ) -> tuple[Encoded | None, Encoded | None]:
        """Return a matrix along its rows, and along its columns; None where that is not wanted.

        role: "input", "weight" or "grad" (of the output). learn: whether statistics may take note
        of it: a graph is recorded. like: an encoding along the rows of this very matrix; what it
        shares with the one to be found (scales of the whole) is taken from there, and nothing is
        communicated. Without it the operator may call `amax_reduce`.
        """

    def output(self, x: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """Return `x weightᵀ` [T, O], a fresh tensor: both along."""

    def input_gradient(self, dy: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        """Return `dy weight` [T, I], a fresh tensor: dy along, the weight across."""

    def weight_gradient(
        self, dy: Encoded, x: Encoded, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Return `dyᵀ x` [O, I], both across; with `out` as `LinearOp.weight_grad`."""


class TorchLinear:
    """`LinearOp` from torch's own matrix products."""

    amax_reduce: Callable[[Tensor], Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            return x @ weight.t()

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            return dy @ weight

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        with torch.no_grad():
            if out is None:
                return dy.t() @ x
            # Rounding each micro-batch's product to bf16 would defeat a float32 buffer.
            return out.addmm_(dy.t().to(out.dtype), x.to(out.dtype))

    def write_weight_grad(self, dy: Tensor, x: Tensor, out: Tensor) -> None:
        """Write what `weight_grad` would add to `out` over what is there."""
        with torch.no_grad():
            torch.mm(dy.t().to(out.dtype), x.to(out.dtype), out=out)

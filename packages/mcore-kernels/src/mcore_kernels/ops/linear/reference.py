"""Linear from torch's matrix products, which accumulate in at least float32.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class ReferenceLinear:
    """`mcore_kernels.protocols.LinearOp` from torch's matrix products."""

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
            # A bf16 product would round every micro-batch's share before it reaches the buffer.
            return out.addmm_(dy.t().to(out.dtype), x.to(out.dtype))

    def write_weight_grad(self, dy: Tensor, x: Tensor, out: Tensor) -> None:
        """Write what `weight_grad` would add to `out` over what is there."""
        with torch.no_grad():
            torch.mm(dy.t().to(out.dtype), x.to(out.dtype), out=out)

"""Linear whose weight gradient is accumulated in float32 by a 16-bit matrix product.

cuBLAS keeps its sums in float32 and adds them to a float32 buffer as it writes them. To round the
product to 16 bits first would lose the low half of every micro-batch's share; to convert the
factors to float32 would leave the tensor cores idle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.linear.reference import ReferenceLinear


class MixedLinear(ReferenceLinear):
    """`mcore_kernels.protocols.LinearOp` on CUDA devices, for bfloat16 and float16."""

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearOp`."""
        if out is None or out.dtype != torch.float32 or dy.dtype == torch.float32:
            return super().weight_grad(dy, x, out)
        with torch.no_grad():
            return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)

    def write_weight_grad(self, dy: Tensor, x: Tensor, out: Tensor) -> None:
        """See `ReferenceLinear`."""
        if out.dtype != torch.float32 or dy.dtype == torch.float32:
            super().write_weight_grad(dy, x, out)
            return
        with torch.no_grad():
            # Times 0 is not read at all, not even where it is NaN.
            torch.addmm(out, dy.t(), x, beta=0, out_dtype=torch.float32, out=out)


LINEAR = MixedLinear()
"""The operator; it holds no state."""

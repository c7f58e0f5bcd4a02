"""L2 norm in plain torch."""

from __future__ import annotations

from torch import Tensor

from mcore_kernels.protocols import accumulation_dtype


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """See `mcore_kernels.protocols.L2NormOp`."""
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

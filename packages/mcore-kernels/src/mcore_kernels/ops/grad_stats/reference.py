"""Norm and health of gradients in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulator(tensors: Sequence[Tensor]) -> tuple[torch.dtype, torch.device]:
    """Where and in which dtype the sums are taken; ValueError when there is no tensor."""
    if not tensors:
        raise ValueError("grad_stats: there is no tensor")
    wide = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return wide, tensors[0].device


def limits(tensors: Sequence[Tensor]) -> str | None:
    """What the Triton kernel takes."""
    if any(x.dtype == torch.float64 for x in tensors):
        return "needs float32 or 16-bit gradients, got float64"
    return None


@torch.no_grad()
def grad_stats(tensors: Sequence[Tensor]) -> Tensor:
    """See `mcore_kernels.protocols.GradStatsOp`."""
    wide, device = accumulator(tensors)
    result = torch.zeros(2, dtype=wide, device=device)
    for x in tensors:
        finite = x.isfinite()
        seen = torch.where(finite, x, 0.0).to(wide)
        result[0] += torch.linalg.vector_norm(seen, dtype=wide).square()
        result[1] += (~finite).sum()
    return result

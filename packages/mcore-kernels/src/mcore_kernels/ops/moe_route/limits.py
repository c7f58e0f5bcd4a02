"""What the Triton router can take. Apart from it, because it imports triton."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.moe_route.rule import RoutingRule

MAX_EXPERTS = 1024


def limits(logits: Tensor, correction: Tensor | None = None, *, rule: RoutingRule) -> str | None:
    """None where the kernel can serve the call, else why not."""
    if rule.float64 or logits.dtype == torch.float64:
        return "computes in float32"
    if logits.shape[-1] > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts, got {logits.shape[-1]}"
    return None

"""Sampling in plain torch, in float64: the same token on every device and in every batch.

N rows, V vocabulary entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Logits come in float32 or less: a sum that misses top_p by this share of the tail has reached it.
_TOP_P_TOLERANCE = 1e-6


def sample(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.SampleOp`."""
    logits = logits.detach()
    if not logits.shape[0]:
        return logits.new_zeros(0, dtype=torch.int64), logits.new_zeros(0, dtype=torch.float32)
    p = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    total = p.cumsum(-1)
    target = uniform.to(total)[:, None] * total[:, -1:]
    # The largest u, 1 - 2^-53, times any number rounds to less than that number: so the first sum
    # beyond the target exists, and belongs to a token that adds to it.
    drawn = torch.searchsorted(total, target, right=True).clamp_(max=p.shape[-1] - 1)
    logprob = p.gather(-1, drawn)[:, 0].log().float()
    return torch.where(logprob.isnan(), -1, drawn[:, 0]), logprob


def probabilities(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """The distributions [N, V] in float64 that `sample` draws from, 1 at one token when cold."""
    wide = logits.double()
    heat = temperature.to(wide)[:, None]
    # Differences first: a tiny temperature makes them -inf at worst, never inf - inf.
    x = (wide - wide.amax(-1, keepdim=True)) / torch.where(heat == 0, 1.0, heat)
    p = torch.softmax(x, -1)
    if top_k is not None or top_p is not None or min_p is not None:
        p = _cut(p, logits, top_k, top_p, min_p)
    cold = torch.zeros_like(p).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # A row of NaN stays what it is: to take its first NaN for the largest would hide it.
    return torch.where((heat == 0) & ~p[:, :1].isnan(), cold, p)


def _cut(
    p: Tensor,
    logits: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    # By logits: several of them can have one probability, when it underflows.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    p = p.gather(-1, order)
    if top_k is not None:
        most = torch.where(top_k > 0, top_k, p.shape[-1])[:, None]
        p = p.masked_fill(torch.arange(p.shape[-1], device=p.device) >= most, 0.0)
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        share = top_p.to(p)[:, None]
        before = p.cumsum(-1) - p
        reached = (before >= share - _TOP_P_TOLERANCE * (1 - share)) & (share < 1)
        reached[:, 0] = False  # the most probable token stays, however small top_p is
        p = p.masked_fill(reached, 0.0)
    if min_p is not None:
        p = p.masked_fill(p < min_p.to(p)[:, None] * p[:, :1], 0.0)
    return torch.zeros_like(p).scatter(-1, order, p / p.sum(-1, keepdim=True))

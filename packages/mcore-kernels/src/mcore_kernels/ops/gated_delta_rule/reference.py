"""The gated delta rule as its recurrence: one step for each token, all documents side by side.

Shapes: T tokens, N documents, L the longest, K key heads of size D, h heads with values of size Dv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.gated_delta_rule.base import check
from mcore_kernels.ops.ssd_scan.base import make_grid
from mcore_kernels.protocols import accumulation_dtype, rounded


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None = None,
    scale: float | None = None,
    initial_states: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.GatedDeltaRuleOp`; memory for the state after every token."""
    check(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, uniform=uniform, initial_states=initial_states,
        chunk_size=chunk_size,
    )  # fmt: skip
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    longest = max_seqlen if uniform is None else uniform[1]
    grid = make_grid(
        v.shape[0], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, uniform=uniform,
        chunk_size=max(1, longest),
    )  # fmt: skip
    (heads, size), key_size = v.shape[1:], q.shape[2]
    values, write = (grid.deal(x.to(wide))[:, 0] for x in (v, beta))  # [N, L, h, …]
    kept = grid.deal(g.to(wide))[:, 0].exp()
    q, k = (grid.deal(x.to(wide))[:, 0].repeat_interleave(heads // x.shape[1], 2) for x in (q, k))
    q = q * (key_size**-0.5 if scale is None else scale)
    if initial_states is None:
        state = values.new_zeros(cu_seqlens.shape[0] - 1, heads, key_size, size)
    else:
        state = initial_states.to(wide)
    out = []
    for t in range(grid.length):
        state = kept[:, t, :, None, None] * state
        wrong = values[:, t] - (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, t].unsqueeze(-1) * (write[:, t].unsqueeze(-1) * wrong).unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    y = torch.stack(out, 1)
    return rounded(grid.collect(y.unsqueeze(1)), dtype), state

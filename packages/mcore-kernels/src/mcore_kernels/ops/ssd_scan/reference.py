"""The scan as its recurrence: one step for each token, all documents side by side.

Shapes: T tokens, N documents, L the longest, h heads of size P, G groups, S state size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_kernels.ops.ssd_scan.base import check, make_grid, step_sizes
from mcore_kernels.protocols import accumulation_dtype, rounded


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform: tuple[int, int] | None = None,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """See `mcore_kernels.protocols.SsdScanOp`; memory for the state after every token."""
    check(
        x, dt, a_log, b, c, cu_seqlens=cu_seqlens, uniform=uniform, d=d, dt_bias=dt_bias,
        dt_limits=dt_limits, initial_states=initial_states, chunk_size=chunk_size,
    )  # fmt: skip
    wide = accumulation_dtype(x.dtype)
    longest = max_seqlen if uniform is None else uniform[1]
    grid = make_grid(
        x.shape[0], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, uniform=uniform,
        chunk_size=max(1, longest),
    )  # fmt: skip
    heads, size, state_size = x.shape[1], x.shape[2], b.shape[2]
    rows = grid.deal(x.to(wide))[:, 0]  # [N, L, h, P]
    step = grid.deal(step_sizes(dt, dt_bias, dt_limits).to(wide))[:, 0]  # 0 beyond a document
    kept = (step * -a_log.to(wide).exp()).exp()
    b, c = (grid.deal(g.to(wide))[:, 0].repeat_interleave(heads // g.shape[1], 2) for g in (b, c))
    if initial_states is None:
        state = rows.new_zeros(cu_seqlens.shape[0] - 1, heads, size, state_size)
    else:
        state = initial_states.to(wide)
    out = []
    for t in range(grid.length):
        taken = step[:, t].unsqueeze(-1) * rows[:, t]
        written = taken.unsqueeze(-1) * b[:, t].unsqueeze(-2)
        state = kept[:, t, :, None, None] * state + written
        out.append((state @ c[:, t].unsqueeze(-1)).squeeze(-1))
    y = torch.stack(out, 1)
    if d is not None:
        y = y + rows * d.to(wide).unsqueeze(-1)
    return rounded(grid.collect(y.unsqueeze(1)), x.dtype), state

"""The scan in chunks: what a token gets from its own chunk, and from the state at its beginning.

Within a chunk the recurrence is a masked matrix product as in attention (the paper's duality);
between chunks only states travel. Shapes: T tokens, N documents, h heads of size P, G groups, S
state size; R lines of K chunks of L rows each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mcore_kernels.ops.ssd_scan.base import carry, check, make_grid, step_sizes
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
    """See `mcore_kernels.protocols.SsdScanOp`.

    Memory: h · L numbers for each token, of both forward and backward, and a state for each chunk.
    A document's chunks begin with it, so that its numbers do not depend on what it is packed with.
    """
    check(
        x, dt, a_log, b, c, cu_seqlens=cu_seqlens, uniform=uniform, d=d, dt_bias=dt_bias,
        dt_limits=dt_limits, initial_states=initial_states, chunk_size=chunk_size,
    )  # fmt: skip
    wide = accumulation_dtype(x.dtype)
    grid = make_grid(
        x.shape[0], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, uniform=uniform,
        chunk_size=chunk_size,
    )  # fmt: skip
    rows = grid.deal(x.to(wide)).transpose(2, 3)  # [R, K, h, L, P]
    step = grid.deal(step_sizes(dt, dt_bias, dt_limits).to(wide)).transpose(2, 3)  # 0 in padding
    b, c = (grid.deal(g.to(wide)).transpose(2, 3) for g in (b, c))  # [R, K, G, L, S]
    # Differences of sums cancel: in float64 the exponents keep their digits in long chunks.
    total = (step * -a_log.to(wide).exp().unsqueeze(-1)).double().cumsum(-1)  # [R, K, h, L]
    taken = rows * step.unsqueeze(-1)

    y = _within(taken, b, c, total)
    rest = (total[..., -1:] - total).to(wide).exp()  # what is left at the end of the chunk
    added = _grouped(taken * rest.unsqueeze(-1), b).transpose(-1, -2) @ b.unsqueeze(3)
    added = added.flatten(2, 3)  # [R, K, h, P, S]
    decay = total[..., -1].to(wide).exp()[..., None, None]
    before, states = carry(
        grid,
        lambda k, state: decay[:, k] * state + added[:, k],
        torch.zeros_like(added[:, 0]),
        initial_states,
    )
    entering = c.unsqueeze(3) @ _grouped(before, b).transpose(-1, -2)  # [R, K, G, h/G, L, P]
    y = y + entering.flatten(2, 3) * total.to(wide).exp().unsqueeze(-1)
    if d is not None:
        y = y + rows * d.to(wide)[:, None, None]
    return rounded(grid.collect(y.transpose(2, 3)), x.dtype), states


def _grouped(x: Tensor, b: Tensor) -> Tensor:
    """x [R, K, h, …] with its heads by group: [R, K, G, h/G, …]."""
    groups = b.shape[2]
    return x.reshape(*x.shape[:2], groups, x.shape[2] // groups, *x.shape[3:])


def _within(taken: Tensor, b: Tensor, c: Tensor, total: Tensor) -> Tensor:
    """What each row gets from the rows of its own chunk, itself included: [R, K, h, L, P]."""
    length = total.shape[-1]
    scores = (c @ b.transpose(-1, -2)).unsqueeze(3)  # [R, K, G, 1, L, L]
    later = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: afterwards infinities would make NaN of their gradients.
    exponent = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(taken.dtype)
    decay = exponent.masked_fill(later, -torch.inf).exp()
    return ((scores * _grouped(decay, b)) @ _grouped(taken, b)).flatten(2, 3)

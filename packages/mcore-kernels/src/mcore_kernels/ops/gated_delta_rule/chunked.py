"""The gated delta rule in chunks: all corrections of a chunk at once, the recurrence between them.

What row i of a chunk writes, u_i = β_i (v_i - R_iᵀ k_i), depends on what the rows before it wrote:
a triangular system, solved for all rows together as a function of the state S at the beginning,
U = U⁰ - W S (the WY form of products of Householder matrices; Yang et al. 2024, arXiv:2406.06484
and arXiv:2412.06464). Shapes: T tokens, N documents, K key heads of size D, h heads with values of
size Dv, r = h / K; R lines of C chunks of L rows each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_kernels.ops.gated_delta_rule.base import check
from mcore_kernels.ops.ssd_scan.base import carry, make_grid
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
    """See `mcore_kernels.protocols.GatedDeltaRuleOp`.

    Memory: h · L numbers for each token, of both forward and backward, and a state for each chunk.
    A document's chunks begin with it, so that its numbers do not depend on what it is packed with.
    """
    check(
        q, k, v, g, beta, cu_seqlens=cu_seqlens, uniform=uniform, initial_states=initial_states,
        chunk_size=chunk_size,
    )  # fmt: skip
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    keys, share = q.shape[1], v.shape[1] // q.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    grid = make_grid(
        v.shape[0], cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, uniform=uniform,
        chunk_size=chunk_size,
    )  # fmt: skip

    def of_heads(x: Tensor) -> Tensor:
        """[T, h, …] to [R, C, K, r, L, …]; rows of padding are zero and change no state."""
        return _grouped(grid.deal(x.to(wide)).transpose(2, 3), keys)

    # [R, C, K, 1, L, D]
    q, k = (grid.deal(x.to(wide)).transpose(2, 3).unsqueeze(3) for x in (q, k))
    v, beta = of_heads(v), of_heads(beta.unsqueeze(-1))
    # Differences of sums cancel: in float64 the exponents keep their digits in long chunks.
    total = of_heads(g).double().cumsum(-1)  # [R, C, K, r, L]
    entering = total.to(wide).exp().unsqueeze(-1)  # what is left of the state at the beginning
    decay = _decay(total).to(wide)

    system = (k @ k.transpose(-1, -2)) * (beta * decay)
    own, seen = _solved(system, beta * v, beta * entering * k)  # U⁰ and W
    left = (total[..., -1:] - total).to(wide).exp().unsqueeze(-1) * k  # as written at the end
    kept = total[..., -1, None, None].to(wide).exp()
    written = []

    def step(c: int, state: Tensor) -> Tensor:
        written.append(own[:, c] - seen[:, c] @ state)
        return kept[:, c] * state + left[:, c].transpose(-1, -2) @ written[-1]

    nothing = v.new_zeros(grid.lines, keys, share, k.shape[-1], v.shape[-1])
    initial = None if initial_states is None else _grouped(initial_states, keys, 1)
    before, states = carry(grid, step, nothing, initial)
    y = (q * entering) @ before + ((q @ k.transpose(-1, -2)) * decay) @ torch.stack(written, 1)
    y = (scale * y).flatten(2, 3).transpose(2, 3)
    return rounded(grid.collect(y), dtype), states.flatten(1, 2)


def _grouped(x: Tensor, keys: int, dim: int = 2) -> Tensor:
    """x with its heads, which are `dim`, by the key head that they read: […, K, r, …]."""
    return x.reshape(*x.shape[:dim], keys, x.shape[dim] // keys, *x.shape[dim + 1 :])


def _decay(total: Tensor) -> Tensor:
    """exp(total_i - total_j) for rows j up to i, 0 for later ones: [..., L] to [..., L, L]."""
    length = total.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=total.device).triu(1)
    # Masked before the exponential: afterwards infinities would make NaN of their gradients.
    exponent = total.unsqueeze(-1) - total.unsqueeze(-2)
    return exponent.masked_fill(later, -torch.inf).exp()


def _solved(system: Tensor, own: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Both right sides solved for the unit lower triangle that has `system` below its diagonal."""
    if system.shape[-1] == 1:  # decoding: nothing was written before
        return own, seen
    both = torch.cat((own, seen), -1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    own, seen = torch.split(both, [own.shape[-1], seen.shape[-1]], dim=-1)
    return own, seen

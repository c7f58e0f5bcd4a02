"""Soft caps and sinks of attention: alone against a dense formula, and over shared documents."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, all_reduce
from mcore_parallel.context import SequenceSplit, context_attention
from mcore_parallel.protocols import AttentionOp, TorchAttention
from mcore_parallel.testing import RankPool

BOUNDS = (0, 8, 8, 24)
WINDOWS = (None, 5)


def inputs() -> list[Tensor]:
    """q, k, v, the gradient of the output and sinks: 4 query and 2 kv heads."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(24, 4, 4), (24, 2, 4), (24, 2, 6), (24, 4, 6), (4,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def run(
    op: AttentionOp, tensors: list[Tensor], bounds: tuple[int, ...], window: int | None
) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of q, k, v and sinks."""
    q, k, v, grad, sinks = tensors
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    longest = max(b - a for a, b in pairwise(bounds))
    out, lse = op(
        *leaves[:3],
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        window=window,
        softcap=1.5,
        sinks=leaves[3],
    )
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


def dense(tensors: list[Tensor], window: int | None) -> list[Tensor]:
    """The same by softmax over one row of scores and the sink."""
    q, k, v, grad, sinks = tensors
    q, k, v, sinks = leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    outs, sums = [], []
    for start, stop in pairwise(BOUNDS):
        for i in range(start, stop):
            first = start if window is None else max(start, i - window + 1)
            scores = torch.einsum("hd,khd->hk", q[i], k[first : i + 1]) / 2
            scores = torch.cat([1.5 * (scores / 1.5).tanh(), sinks[:, None]], 1)
            sums.append(scores.logsumexp(1))
            outs.append(torch.einsum("hk,khd->hd", scores.softmax(1)[:, :-1], v[first : i + 1]))
    out = torch.stack(outs)
    return [out.detach(), torch.stack(sums).detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("window", WINDOWS)
def test_one_process_follows_the_formula(window: int | None) -> None:
    for got, want in zip(run(TorchAttention(), inputs(), BOUNDS, window), dense(inputs(), window),
                         strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def shared(kind: str) -> list[list[Tensor]]:
    group = Group.world()
    op, split = context_attention(kind, group), SequenceSplit(bounds=BOUNDS, size=group.size)
    found = []
    for window in WINDOWS:
        *rows, sinks = inputs()
        mine = [split.take(x, group.rank) for x in rows]
        *results, d_sinks = run(op, [*mine, sinks], split.local_bounds, window)
        whole = [split.gather(x.contiguous(), group) for x in results]
        found.append([*whole, all_reduce(d_sinks, group)])
    group.close()
    return found


KINDS = [(2, "ring"), (2, "all-gather"), (2, "all-to-all"), (4, "two-level"), (4, "ring")]


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_every_kind_equals_one_process(ranks: RankPool, world: int, kind: str) -> None:
    """The gradient of sinks is a sum over the ranks, as that of any parameter."""
    for results, window in zip(ranks.run(shared, world, kind)[0], WINDOWS, strict=True):
        for got, want in zip(results, dense(inputs(), window), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)

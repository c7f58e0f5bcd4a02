"""Tokens that all ranks hold alike are dealt out and gathered again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.expert import join_shares, share_of, take_share
from mcore_parallel.testing import RankPool


@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shares_are_all_of_it_once(total: int, size: int) -> None:
    groups = [Group(rank, size, tuple(range(size))) for rank in range(size)]
    shares = [share_of(total, group) for group in groups]
    assert [i for share in shares for i in range(total)[share]] == list(range(total))
    assert max(share.stop - share.start for share in shares) == -(-total // size)


def double_mine(total: int) -> tuple[Tensor, Tensor]:
    """Every rank doubles its rows plus its rank; output, and gradient of the input."""
    group = Group.world()
    x = torch.arange(2.0 * total, dtype=torch.float64).view(total, 2).requires_grad_()
    mine = take_share(x, group)
    assert torch.equal(mine, x[share_of(total, group)])
    y = join_shares(mine * (2 + group.rank), group, total)
    (y * torch.arange(1.0, 3.0)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("total", [0, 1, 4, 5])
def test_every_rank_gets_all_rows_and_the_whole_gradient(ranks: RankPool, total: int) -> None:
    factors = torch.ones(total, 1, dtype=torch.float64)
    for rank in range(3):
        factors[share_of(total, Group(rank, 3, (0, 1, 2)))] = 2 + rank
    x = torch.arange(2.0 * total, dtype=torch.float64).view(total, 2)
    for y, grad in ranks.run(double_mine, 3, total):
        assert torch.equal(y, x * factors)
        assert torch.equal(grad, factors * torch.arange(1.0, 3.0))

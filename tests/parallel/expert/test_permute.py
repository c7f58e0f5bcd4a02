"""Copies of tokens in the order of rows and back, against plain indexing."""

import pytest
import torch
from torch import Tensor

from mcore_parallel.expert import RowOrder, TorchPermute


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("left_out", [0, 3, 1000])
@pytest.mark.parametrize(("tokens", "copies"), [(5, 1), (4, 3), (0, 2)])
def test_rows_and_sums_and_their_gradients(
    tokens: int, copies: int, left_out: int, weighted: bool
) -> None:
    """Complete orders, some copies without a row, none with one."""
    op, size = TorchPermute(), tokens * copies
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))[left_out:]
    rows_of = RowOrder.of(order, size, copies)
    x, factors, weights = random(tokens, 2), random(len(order), 2), random(tokens, copies, seed=2)
    given = weights if weighted else None
    rows = op.permute(x, rows_of)
    found = op.unpermute(rows * factors, given, rows_of)
    plain_rows = x[order // copies]
    share = plain_rows * factors
    if weighted:
        share = share * weights.flatten()[order].unsqueeze(-1)
    want = torch.zeros(tokens, 2, dtype=torch.float64).index_add(0, order // copies, share)
    assert torch.equal(rows, plain_rows)
    torch.testing.assert_close(found, want)
    leaves = [x, factors, weights] if weighted else [x, factors]
    direction = random(tokens, 2, seed=3).detach()
    for mine, theirs in zip(
        torch.autograd.grad((found * direction).sum(), leaves),
        torch.autograd.grad((want * direction).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_sums_are_as_precise_as_the_weights() -> None:
    rows = random(4, 3).detach().to(torch.bfloat16).requires_grad_()
    weights = random(2, 2).detach().float()
    order = RowOrder.of(torch.tensor([2, 0, 3, 1]), 4, 2)
    want = (rows.float()[order.places] * weights.unsqueeze(-1)).sum(1)
    rounded = TorchPermute().unpermute(rows, weights, order)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, want.to(torch.bfloat16))
    rounded.sum().backward()
    assert rows.grad is not None
    assert rows.grad.dtype == torch.bfloat16


def test_a_weight_of_nothing_gets_no_gradient_from_what_is_not_finite() -> None:
    """A copy without a row adds nothing even where the first row is infinite."""
    rows = torch.full((1, 2), torch.inf)
    weights = torch.ones(2, 1, requires_grad=True)
    out = TorchPermute().unpermute(rows, weights, RowOrder.of(torch.tensor([0]), 2))
    out[1].sum().backward()
    assert out[1].tolist() == [0.0, 0.0]
    assert weights.grad is not None
    assert weights.grad[1] == 0

"""Many products in one call: values, gradients, and experts without rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel.expert import SequentialLinear, grouped_linear
from mcore_parallel.expert.rows_of import bias_gradient
from mcore_parallel.pipeline import DeferredGradients

COUNTS = [(2, 0, 3), (0, 0, 5), (1, 1, 1), (0, 0, 0)]


def data(rows: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return draw(rows, 4), draw(3, 2, 4), draw(3, 2) if bias else None


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    y = torch.einsum("ri,roi->ro", x, weight[expert])
    return y if bias is None else y + bias[expert]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_products_and_gradients(counts: tuple[int, ...], bias: bool, on_device: bool) -> None:
    inputs = data(sum(counts), bias)
    leaves = [leaf for leaf in inputs if leaf is not None]
    given = torch.tensor(counts) if on_device else counts
    y = grouped_linear(*inputs, given, op=SequentialLinear())
    want = plain(*inputs, counts)
    torch.testing.assert_close(y, want)
    grads = torch.autograd.grad((y * y).sum(), leaves)
    for found, wanted in zip(grads, torch.autograd.grad((want * want).sum(), leaves), strict=True):
        torch.testing.assert_close(found, wanted)
    if counts[1] == 0:
        assert not grads[1][1].any()


def test_weight_gradients_go_to_the_main_buffer() -> None:
    """In 16 bits products are added to the fp32 buffer unrounded, and autograd has nothing to add.

    Frozen weights get none.
    """
    x = torch.randn(6, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(3, 2, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(3, 2, 4)  # type: ignore[attr-defined]
    weight.grad_added_to_main = False  # type: ignore[attr-defined]
    for _ in range(2):
        y = grouped_linear(x, weight, None, (2, 0, 4), op=SequentialLinear())
        assert y.dtype == torch.bfloat16
        y.backward(torch.ones_like(y))
    assert weight.grad_added_to_main  # type: ignore[attr-defined]
    rows = x.detach().float()
    sums = torch.stack([rows[:2].sum(0), torch.zeros(4), rows[2:].sum(0)])
    wanted = 2 * sums[:, None].expand(3, 2, 4)
    torch.testing.assert_close(weight.main_grad, wanted)  # type: ignore[attr-defined]
    frozen = weight.detach()
    x.grad = None
    grouped_linear(x, frozen, None, (2, 0, 4), op=SequentialLinear()).sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize("main", [False, True])
def test_weight_gradients_may_be_computed_later(main: bool) -> None:
    """As a split pipeline schedule asks for: the input's gradient first, then the weight's."""
    x, weight, _ = data(5, False)
    counts = (2, 0, 3)
    wanted = torch.autograd.grad(plain(x, weight, None, counts).square().sum(), (x, weight))
    parameter = nn.Parameter(weight.detach())
    if main:
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    later = DeferredGradients([parameter])
    with later.collect() as pending:
        grouped_linear(x, parameter, None, counts, op=SequentialLinear()).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted[0])
    assert parameter.grad is None
    later.compute(pending)
    found = parameter.main_grad if main else parameter.grad  # type: ignore[attr-defined]
    torch.testing.assert_close(found, wanted[1])
    later.close()


def test_counts_that_do_not_fit_are_refused() -> None:
    x, weight, _ = data(5, False)
    for counts in ((2, 3), (2, 2, 2)):
        with pytest.raises(ValueError, match="3 numbers, one for each expert, that add up to 5"):
            grouped_linear(x, weight, None, counts, op=SequentialLinear())
    with pytest.raises(ValueError, match=r"counts of shape \[2\] must be 3 numbers, one for each"):
        grouped_linear(x, weight, None, torch.tensor([2, 3]), op=SequentialLinear())


def test_gradients_of_biases_are_summed_up_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ones beyond 256, where bfloat16 has no room for another; the columns a few at a time."""
    dy = torch.ones(700, 5, dtype=torch.bfloat16)
    for at_once in (2**26, 1400, 1):
        monkeypatch.setattr("mcore_parallel.expert.rows_of._AT_ONCE", at_once)
        found = bias_gradient(dy, torch.tensor([100, 0, 600]))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, torch.tensor([[100.0], [0], [600]]).expand(3, 5).bfloat16())

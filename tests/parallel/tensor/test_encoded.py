"""Linear layers over an operator whose factors take a form of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import Group, RngKey, all_reduce, initialise, param_specs
from mcore_parallel.pipeline import DeferredGradients
from mcore_parallel.protocols import Encoded, EncodedLinearOp
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.testing import RankPool

T = 8


class Rounded:
    """Whole numbers up to 50 and a scale for the matrix; products of them."""

    amax_reduce: Callable[[Tensor], Tensor] | None = None

    def __init__(self) -> None:
        self.encoded: list[tuple[str, tuple[int, ...], bool]] = []

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("layers encode")

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("layers encode")

    def input_grad(self, dy: Tensor, weight: Tensor) -> Tensor:
        raise AssertionError("layers encode")

    def weight_grad(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        raise AssertionError("layers encode")

    def encode(
        self,
        role: str,
        x: Tensor,
        *,
        along: bool = True,
        across: bool = True,
        learn: bool = True,
        like: Encoded | None = None,
    ) -> tuple[Encoded | None, Encoded | None]:
        self.encoded.append((role, tuple(x.shape), learn))
        with torch.no_grad():
            if like is not None:
                scale = like[1]
            else:
                amax = x.abs().max().view(1)
                scale = (amax if self.amax_reduce is None else self.amax_reduce(amax)) / 50
            numbers = (x / scale).round()
        return (
            (numbers, scale) if along else None,
            (numbers.t().contiguous(), scale) if across else None,
        )

    def output(self, x: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return _product(x, weight, dtype)

    def input_gradient(self, dy: Encoded, weight: Encoded, dtype: torch.dtype) -> Tensor:
        return _product(dy, weight, dtype)

    def weight_gradient(
        self, dy: Encoded, x: Encoded, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        return _product(dy, x, dtype) if out is None else out.add_(_product(dy, x, out.dtype))


def _product(a: Encoded, b: Encoded, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        return (a[0] @ b[0].t() * a[1] * b[1]).to(dtype)


operator: EncodedLinearOp = Rounded()


def run(sequence_parallel: bool, way: str, exact: bool = False) -> tuple[list[Tensor], list[Any]]:
    """Output, gradients of the input and of all weights, and what was encoded (exact: nothing)."""
    group, op = Group.world(), Rounded()
    op.amax_reduce = partial(all_reduce, group=group, op="max")
    options: dict[str, Any] = {
        "group": group,
        "bias": True,
        "sequence_parallel": sequence_parallel,
        "linear": None if exact else op,
        "dtype": torch.float64,
    }
    column, row = ColumnParallelLinear(4, 8, **options), RowParallelLinear(8, 4, **options)
    model = nn.Sequential(column, row)
    specs = param_specs(model, tp=group, sequence_parallel=sequence_parallel)
    initialise(dict(model.named_parameters()), specs, RngKey(1))
    x = torch.linspace(-1, 1, T * 4, dtype=torch.float64).view(T, 4).sin()
    mine = x.chunk(group.size)[group.rank] if sequence_parallel else x
    mine = mine.clone().requires_grad_()
    if way == "main_grad":
        for layer in (column, row):
            layer.weight.main_grad = torch.zeros_like(layer.weight)  # type: ignore[assignment]
    if way == "frozen":
        column.weight.requires_grad_(False)
    deferred = DeferredGradients(model.parameters()) if way == "deferred" else None
    y = model(mine)
    loss = (y * torch.linspace(0.5, 1, 4)).square().sum()
    if deferred is not None:
        with deferred.collect() as pending:
            loss.backward()
        assert column.weight.grad is None
        DeferredGradients.compute(pending)
    else:
        loss.backward()
    assert mine.grad is not None
    grads = [mine.grad]
    for layer in (column, row):
        found = getattr(layer.weight, "main_grad", layer.weight.grad)
        grads.append(torch.zeros_like(layer.weight) if found is None else found)
    return [y.detach(), *grads], op.encoded


def whole(per_rank: list[tuple[list[Tensor], list[Any]]], sequence_parallel: bool) -> list[Tensor]:
    """Parts of all ranks put together."""
    y, dx, column, row = zip(*(tensors for tensors, _ in per_rank), strict=True)
    if sequence_parallel:
        y, dx = (torch.cat(y),), (torch.cat(dx),)
    return [y[0], dx[0], torch.cat(column), torch.cat(row, dim=1)]


@pytest.mark.parametrize("way", ["autograd", "main_grad", "deferred", "frozen"])
def test_two_ranks_with_shared_scales_are_one(ranks: RankPool, way: str) -> None:
    alone, encoded = run(False, way)
    # Each factor once: three for a layer whose weight is trained.
    assert [role for role, _, _ in encoded] == 2 * ["input", "weight"] + 2 * ["grad", "weight"]
    for sequence_parallel in (False, True):
        two = whole(ranks.run(run, 2, sequence_parallel, way), sequence_parallel)
        for ours, theirs in zip(two, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    exact, _ = run(False, way, exact=True)
    for ours, theirs in zip(alone, exact, strict=True):
        if theirs.any():  # not of what is frozen
            assert 1e-4 < float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_nothing_is_learned_nor_kept_where_no_graph_is_recorded() -> None:
    op = Rounded()
    layer = ColumnParallelLinear(4, 8, linear=op)
    with torch.no_grad():
        assert not layer(torch.ones(2, 4)).requires_grad
    layer(torch.ones(2, 4))
    assert [learn for _, _, learn in op.encoded] == [False, False, True, True]

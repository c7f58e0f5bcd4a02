"""The check that authors of dispatchers run: it accepts ours, and finds planted faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelConfig, ParallelMesh
from mcore_parallel.expert import (
    DISPATCHERS,
    AllToAll,
    RowOrder,
    TorchPermute,
    check_dispatch,
    dispatcher_factory,
)
from mcore_parallel.expert.local import Local
from mcore_parallel.testing import RankPool

ALONE = {"ep": Group.single(), "etp": Group.single()}


def checked(layout: str, name: str) -> None:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    factory = dispatcher_factory(name)
    check_dispatch(factory, ep=mesh.ep, etp=mesh.etp)
    check_dispatch(factory, ep=mesh.ep, etp=mesh.etp, num_experts=4, dtype=torch.bfloat16)
    mesh.close()


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize(("world", "layout"), [(2, "dp=2,ep=2"), (4, "dp=4,ep=2,etp=2")])
def test_dispatchers_over_ranks(ranks: RankPool, world: int, layout: str, name: str) -> None:
    ranks.run(checked, world, layout, name)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_dispatchers_of_one_process(name: str) -> None:
    check_dispatch(dispatcher_factory(name), num_experts=3, **ALONE)
    check_dispatch(dispatcher_factory(name), num_experts=1, dtype=torch.float64, **ALONE)


def test_the_dispatcher_where_nothing_travels_or_is_dropped() -> None:
    check_dispatch(Local, num_experts=3, drops=False, **ALONE)
    check_dispatch(Local, num_experts=1, drops=False, dtype=torch.float64, **ALONE)
    with pytest.raises(ValueError, match="Local: experts lie on ep=1 × etp=2 ranks, where tokens"):
        Local(4, ep=Group.single(), etp=Group(0, 2, (0, 1)), permute=TorchPermute())


@dataclass(frozen=True, kw_only=True)
class Wrong(TorchPermute):
    """A permutation with one fault."""

    fault: str

    def permute(self, x: Tensor, order: RowOrder, /) -> Tensor:
        rows = super().permute(x, order)
        return rows.flip(0) if self.fault == "order" else rows

    def unpermute(self, rows: Tensor, weights: Tensor | None, order: RowOrder, /) -> Tensor:
        if weights is not None and self.fault == "weights":
            weights = weights.detach()
        if self.fault == "gradient":
            rows = rows * 2 - rows.detach()
        return super().unpermute(rows, weights, order)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("order", "as many tokens on every rank: outputs differ by up to"),
        (
            "weights",
            r"as many tokens on every rank: gradients of weights of shape None, not \[6, 2",
        ),
        ("gradient", "as many tokens on every rank: gradients of tokens differ by up to"),
    ],
)
def test_faults_are_found(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_dispatch(AllToAll, num_experts=4, permute=Wrong(fault=fault), **ALONE)


def test_counts_that_do_not_fit_are_found() -> None:
    class Miscounting(AllToAll):
        def __call__(self, *args: Any) -> Any:
            sent = super().__call__(*args)
            object.__setattr__(sent.route, "counts", (*sent.route.counts, 1))
            return sent

    with pytest.raises(AssertionError, match=r"counts \[.*, 1\] for 12 rows of 4 experts"):
        check_dispatch(Miscounting, num_experts=4, **ALONE)

"""Exchanges that computation hides: what is under way while something is computed."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelConfig, ParallelMesh, exchange
from mcore_parallel._torch import default_store
from mcore_parallel.expert import start_exchange
from mcore_parallel.testing import RankPool

Met = dict[str, bool]


class Computing(torch.autograd.Function):
    """What rank 0 computes while rows travel; it does not end before rank 1 has its own.

    That can only come true where rank 0 has sent before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, met: Met, seconds: float) -> Tensor:
        ctx.wait = met, seconds
        default_store().set("computes/forward", "1")
        met["sent before, forward"] = came("arrived/forward", seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        met, seconds = ctx.wait
        default_store().set("computes/backward", "1")
        met["sent before, backward"] = came("arrived/backward", seconds)
        return grad, None, None


class Before(torch.autograd.Function):
    """Rank 1 sends nothing until rank 0 computes; and it has all gradients.

    That can only come true where rank 0 does not wait for it first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, met: Met, seconds: float) -> Tensor:
        met["waited after, forward"] = came("computes/forward", seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        default_store().set("arrived/backward", "1")
        return grad, None, None


class After(torch.autograd.Function):
    """Rank 1 has its rows; and it sends no gradients until rank 0 computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, met: Met, seconds: float) -> Tensor:
        ctx.wait = met, seconds
        default_store().set("arrived/forward", "1")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        met, seconds = ctx.wait
        met["waited after, backward"] = came("computes/backward", seconds)
        return grad, None, None


def came(key: str, seconds: float) -> bool:
    try:
        default_store().wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # it took too long
        return False
    return True


def exchanged(overlap: bool, seconds: float) -> tuple[Met, Tensor, Tensor]:
    mesh = ParallelMesh.create(ParallelConfig.parse("dp=2,ep=2"))
    assert mesh is not None
    met: Met = {}
    x = torch.arange(6.0).view(3, 2).add(10 * mesh.rank).requires_grad_()
    first = mesh.rank == 0
    sent = x if first else Before.apply(x, met, seconds)  # type: ignore[no-untyped-call]
    # What comes from each rank, and what goes there.
    transit = start_exchange(sent, mesh.ep, [1 + mesh.rank] * 2, [1, 2], overlap=overlap)
    beside = Computing.apply(x, met, seconds) if first else x * 2  # type: ignore[no-untyped-call]
    y = transit.wait()
    y = y if first else After.apply(y, met, seconds)  # type: ignore[no-untyped-call]
    (y.square().sum() + beside.sum()).backward()
    mesh.close()
    assert x.grad is not None
    return met, y.detach(), x.grad


@pytest.mark.parametrize("overlap", [True, False])
def test_an_exchange_is_under_way_while_something_is_computed(
    ranks: RankPool, overlap: bool
) -> None:
    """Rank 0 sends before it computes and waits after, both ways; without overlap not both."""
    found = ranks.run(exchanged, 2, overlap, 30.0 if overlap else 0.4)
    assert found[0][0] | found[1][0] == {
        "sent before, forward": True,
        "waited after, forward": overlap,
        "sent before, backward": overlap,
        "waited after, backward": True,
    }
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(found[0][1], torch.stack([rows[0], rows[0] + 10]))
    assert torch.equal(found[1][1], torch.cat([rows[1:], rows[1:] + 10]))
    assert torch.equal(found[0][2], 2 * rows + 1)
    assert torch.equal(found[1][2], 2 * (rows + 10) + 2)


def looked_into() -> None:
    mesh = ParallelMesh.create(ParallelConfig.parse("dp=2,ep=2"))
    assert mesh is not None
    x = torch.ones(2, 1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        y = start_exchange(x, mesh.ep, [1, 1], [1, 1]).wait()
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x)
    assert grad.tolist() == [[3.0], [3.0]]
    with torch.no_grad():
        one = start_exchange(x, mesh.ep, [1, 1], [1, 1])
        assert torch.equal(one.wait(), exchange(x, mesh.ep, [1, 1], [1, 1]))
    mesh.close()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_can_be_looked_for_and_no_graph_is_needed(ranks: RankPool) -> None:
    ranks.run(looked_into, 2)

"""Shared experts run while tokens are on their way to the others, and so do their gradients."""

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel._torch import default_store
from mcore_parallel.expert import RowOrder, TorchPermute
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parent))
from moe_layers import H, batch_of, changed, context_of, make, random

CONFIG = changed(shared_ffn_size=12, shared_gate=True)
WHAT = ("sent before", "waited after")
Met = dict[str, bool]


class Shared(torch.autograd.Function):
    """Rank 0 runs its shared experts, forward or backward, and not on until rank 1 has its rows.

    That can only come true where rank 0 has sent before.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, met: Met, seconds: float) -> Tensor:
        ctx.wait = met, seconds
        default_store().set("computes/forward", "1")
        met["sent before, forward"] = came("arrived/forward", seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        met, seconds = ctx.wait
        default_store().set("computes/backward", "1")
        met["sent before, backward"] = came("arrived/backward", seconds)
        return grad, None, None


class LatePermute(TorchPermute):
    """Rank 1 sends no rows until rank 0 computes.

    That can only come true where rank 0 does not wait for them first.
    """

    def __init__(self, met: Met, seconds: float) -> None:
        self.met, self.seconds = met, seconds

    def permute(self, x: Tensor, order: RowOrder) -> Tensor:
        if "waited after, forward" not in self.met:
            self.met["waited after, forward"] = came("computes/forward", self.seconds)
        return super().permute(x, order)


class Late(torch.autograd.Function):
    """Rank 1 has its rows; and it sends no gradients of them until rank 0 computes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, met: Met, seconds: float) -> Tensor:
        ctx.wait = met, seconds
        default_store().set("arrived/forward", "1")
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        met, seconds = ctx.wait
        met["waited after, backward"] = came("computes/backward", seconds)
        return grad, None, None


class Input(torch.autograd.Function):
    """Rank 1 has all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        default_store().set("arrived/backward", "1")
        return grad


def came(key: str, seconds: float) -> bool:
    try:
        default_store().wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # it took too long
        return False
    return True


def trained(layout: str, seconds: float) -> tuple[Met, list[Tensor]]:
    """What the two ranks met with, and outputs and gradients."""
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    met: Met = {}
    hidden = x = random(6, H, seed=mesh.rank).requires_grad_()
    if mesh.rank == 1:
        x = Input.apply(hidden)  # type: ignore[no-untyped-call]
        layer = make(CONFIG, mesh, permute=LatePermute(met, seconds))
        layer.experts.register_forward_pre_hook(
            lambda module, args: (Late.apply(args[0], met, seconds), args[1])  # type: ignore[no-untyped-call]
        )
    else:
        layer = make(CONFIG, mesh)
        layer.shared.register_forward_hook(
            lambda module, args, out: Shared.apply(out, met, seconds)  # type: ignore[no-untyped-call]
        )
    context = context_of(CONFIG, batch_of(torch.ones(6), [0, 6]), 12.0)
    out = layer(x, context)
    out.square().sum().backward()
    mesh.close()
    gradients = [p.grad for p in (hidden, *layer.parameters())]
    return met, [out.detach(), *(grad for grad in gradients if grad is not None)]


def test_tokens_travel_while_shared_experts_run(ranks: RankPool) -> None:
    """Rank 0 sends before it computes and waits after, both ways; without overlap not both.

    The same bits with it and without.
    """
    found = ranks.run(trained, 2, "dp=2,ep=2", 30.0)
    plain = ranks.run(trained, 2, "dp=2,ep=2,overlap=0", 0.4)
    ways = [f"{what}, {way}" for what in WHAT for way in ("forward", "backward")]
    assert found[0][0] | found[1][0] == dict.fromkeys(ways, True)
    without = {"sent before, backward": False, "waited after, forward": False}
    assert plain[0][0] | plain[1][0] == dict.fromkeys(ways, True) | without
    for (_, mine), (_, theirs) in zip(found, plain, strict=True):
        assert len(mine) == len(theirs) == 8
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

"""Tokens reach their experts and come back, over any ep and etp, however they choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import (
    GradientBuckets,
    Group,
    Init,
    ParallelConfig,
    ParallelMesh,
    Part,
    RngKey,
    initialise,
    param_specs,
)
from mcore_parallel.expert import AllToAll, ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.layout import check_tiling, gather_all, gather_layouts
from mcore_parallel.testing import RankPool

E, H, F, K = 4, 6, 8, 2
INIT = Init(kind="normal", std=0.4)
TOKENS = 12  # over all ranks


def choices(kind: str) -> Tensor:
    """The experts of all tokens, [TOKENS, k]."""
    generator = torch.Generator().manual_seed(4)
    if kind == "random":
        rows = [torch.randperm(E, generator=generator)[:K] for _ in range(TOKENS)]
        return torch.stack(rows)
    if kind == "one":  # top-1, and all the same: every other expert is idle
        return torch.zeros(TOKENS, 1, dtype=torch.int64)
    if kind == "last":
        return torch.tensor([[3, 2]]).repeat(TOKENS, 1)
    return torch.stack([torch.randperm(E, generator=generator) for _ in range(TOKENS)])  # all


class Layer(nn.Module):
    """Experts with everything that has a layout: two fused parts, and biases."""

    def __init__(self, ep: Group, etp: Group) -> None:
        super().__init__()
        shared: dict[str, Any] = {"ep": ep, "etp": etp, "bias": True, "init": INIT}
        parts = [Part("gate", F), Part("up", F)]
        self.gate_up = ExpertColumnLinear(E, H, parts, dtype=torch.float64, **shared)
        self.down = ExpertRowLinear(E, F, H, dtype=torch.float64, **shared)
        self._dispatch = AllToAll(E, ep=ep, etp=etp)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        sent = self._dispatch(x, experts)
        assert sum(sent.counts) == len(sent.rows)
        gate, up = self.gate_up(sent.rows, sent.counts).chunk(2, -1)
        return sent.combine(self.down(gate.sigmoid() * up, sent.counts))


def measure(layout: str, kind: str, uneven: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """My tokens' outputs and gradients, and the global gradients of all parameters."""
    config = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(config) if config.dp != 1 else ParallelMesh.single()
    assert mesh is not None
    layer = Layer(mesh.ep, mesh.etp)
    specs = param_specs(layer, tp=mesh.tp, sequence_parallel=False, prefix="experts")
    assert all(spec.expert for spec in specs.values())
    assert {n for n, s in specs.items() if not s.decay} == {"gate_up.bias", "down.bias"}
    copies = mesh.edp.rank, mesh.edp.size
    layouts = {name: spec.layout.replicated(*copies) for name, spec in specs.items()}
    everywhere = gather_layouts(layouts, mesh.world).values()
    check_tiling(layout for of_rank in everywhere for layout in of_rank.values())
    params = dict(layer.named_parameters())
    initialise(params, specs, RngKey(3))
    with torch.no_grad():  # biases start at zero, which would hide them
        for name in ("gate_up.bias", "down.bias"):
            params[name] += 0.5
    buckets = GradientBuckets(params, specs, mesh)
    buckets.zero()
    # One rank may have all tokens and the others none.
    size = mesh.world.size
    mine = slice(mesh.rank * TOKENS // size, (mesh.rank + 1) * TOKENS // size)
    if uneven:
        mine = slice(0, TOKENS if mesh.rank == size - 1 else 0)
    whole = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = whole[mine].requires_grad_()
    y = layer(x, choices(kind)[mine])
    y.square().sum().backward()
    buckets.finish()
    gradients = gather_all(buckets.gradients(), mesh.world)
    mesh.close()
    assert x.grad is not None
    return y.detach(), x.grad, gradients


LAYOUTS = [
    (2, "dp=2,ep=2"),
    (2, "dp=2,etp=2"),
    (4, "dp=4,ep=2,etp=2"),
    (4, "dp=4,ep=4"),
    (4, "tp=2,dp=2,ep=2,etp=1"),
]


@pytest.mark.parametrize(
    ("kind", "uneven"),
    [("random", False), ("random", True), ("one", False), ("last", True), ("all", False)],
)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_equals_one_process(
    ranks: RankPool, world: int, layout: str, kind: str, uneven: bool
) -> None:
    """U39's kinds: all to one expert, a rank without tokens, every expert chosen, ep = experts.

    Outputs, gradients of tokens and of parameters: an idle expert's are zero.
    """
    y, dx, gradients = measure("dp=1", kind, uneven)
    found = ranks.run(measure, world, layout, kind, uneven)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), y)
    torch.testing.assert_close(torch.cat([one[1] for one in found]), dx)
    assert found[0][2].keys() == gradients.keys()
    names = {f"grad/experts.{n}.{k}" for n in ("gate", "up", "down") for k in ("weight", "bias")}
    assert names == gradients.keys()
    for name, want in gradients.items():
        torch.testing.assert_close(found[0][2][name], want)
        assert want.shape[0] == E
        if kind == "one":
            assert want[0].any()
            assert not found[0][2][name][1:].any()


def test_experts_and_widths_that_do_not_fit() -> None:
    three = Group(0, 3, (0, 1, 2))
    with pytest.raises(ValueError, match=r"4 experts cannot be dealt out over ep=3.*1, 2, 4"):
        AllToAll(4, ep=three, etp=Group.single())
    with pytest.raises(ValueError, match=r"4 experts cannot be dealt out over ep=3.*1, 2, 4"):
        ExpertRowLinear(4, 6, 6, ep=three)
    with pytest.raises(ValueError, match="part 'up' of 8 features cannot be cut over etp=3"):
        ExpertColumnLinear(4, 6, [Part("gate", 6), Part("up", 8)], etp=three)
    with pytest.raises(ValueError, match=r"input of 8 features.*valid etp: 1, 2, 4, 8"):
        ExpertRowLinear(4, 8, 6, etp=three)


def on_gpu(kind: str) -> tuple[Tensor, Tensor]:
    mesh = ParallelMesh.create(ParallelConfig.parse("dp=2,ep=2"), device="cuda")
    assert mesh is not None
    layer = Layer(mesh.ep, mesh.etp).to(mesh.device)
    specs = param_specs(layer, tp=mesh.tp, sequence_parallel=False, prefix="experts")
    initialise(dict(layer.named_parameters()), specs, RngKey(3))
    half = slice(mesh.rank * TOKENS // 2, (mesh.rank + 1) * TOKENS // 2)
    whole = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = whole[half].to(mesh.device).requires_grad_()
    y = layer(x, choices(kind)[half].to(mesh.device))
    y.square().sum().backward()
    mesh.close()
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu()


def on_cpu(kind: str) -> tuple[Tensor, Tensor]:
    layer = Layer(Group.single(), Group.single())
    specs = param_specs(layer, tp=Group.single(), sequence_parallel=False, prefix="experts")
    initialise(dict(layer.named_parameters()), specs, RngKey(3))
    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = layer(x.requires_grad_(), choices(kind))
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["random", "one", "all"])
def test_gpus_equal_the_cpu(ranks: RankPool, kind: str) -> None:
    found = ranks.run(on_gpu, 2, kind, device="cuda")
    for i, want in enumerate(on_cpu(kind)):
        torch.testing.assert_close(torch.cat([one[i] for one in found]), want)

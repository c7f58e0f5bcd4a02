"""Tokens reach their experts and come back, over any ep and etp, however they choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from mcore_parallel.expert import (
    DISPATCHERS,
    AllGather,
    AllToAll,
    ExpertColumnLinear,
    ExpertRowLinear,
    make_dispatcher,
)
from mcore_parallel.layout import check_tiling, gather_all, gather_layouts
from mcore_parallel.testing import RankPool

E, H, F, K = 4, 6, 8, 2
INIT = Init(kind="normal", std=0.4)
TOKENS = 12  # over all ranks


def choices(kind: str) -> Tensor:
    """The experts of all tokens, [TOKENS, k]."""
    generator = torch.Generator().manual_seed(4)
    if kind in ("random", "dropped"):
        rows = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(TOKENS)])
        # A token may keep one choice or none, and one expert get nothing.
        return rows.masked_fill(rows == 2, -1) if kind == "dropped" else rows
    if kind == "one":  # top-1, and all the same: every other expert is idle
        return torch.zeros(TOKENS, 1, dtype=torch.int64)
    if kind == "last":
        return torch.tensor([[3, 2]]).repeat(TOKENS, 1)
    if kind == "nothing":
        return torch.full((TOKENS, K), -1)
    return torch.stack([torch.randperm(E, generator=generator) for _ in range(TOKENS)])  # all


class Layer(nn.Module):
    """Experts with everything that has a layout: two fused parts, and biases."""

    def __init__(self, ep: Group, etp: Group, dispatcher: str, *, overlap: bool = True) -> None:
        super().__init__()
        shared: dict[str, Any] = {"ep": ep, "etp": etp, "bias": True, "init": INIT}
        parts = [Part("gate", F), Part("up", F)]
        self.gate_up = ExpertColumnLinear(E, H, parts, dtype=torch.float64, **shared)
        self.down = ExpertRowLinear(E, F, H, dtype=torch.float64, **shared)
        self._dispatch = make_dispatcher(dispatcher, E, ep=ep, etp=etp, overlap=overlap)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        sent = self._dispatch(x, experts, weights).wait()
        assert sum(sent.counts) == len(sent.rows)
        gate, up = self.gate_up(sent.rows, sent.counts).chunk(2, -1)
        return sent.combine(self.down(gate.sigmoid() * up, sent.counts)).wait()


Result = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]
CASES = [
    *[("random", False), ("random", True), ("one", False), ("last", True), ("all", False)],
    *[("dropped", False), ("dropped", True), ("nothing", False)],
]


def measure(layout: str, dispatcher: str, overlap: bool = True) -> list[Result]:
    """Of each case my tokens' outputs and gradients (of weights too), and those of parameters."""
    config = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(config) if config.dp != 1 else ParallelMesh.single()
    assert mesh is not None
    layer = Layer(mesh.ep, mesh.etp, dispatcher, overlap=overlap)
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
    found = [one_case(layer, buckets, mesh, kind, uneven) for kind, uneven in CASES]
    mesh.close()
    return found


def one_case(
    layer: Layer, buckets: GradientBuckets, mesh: ParallelMesh, kind: str, uneven: bool
) -> Result:
    # One rank may have all tokens and the others none.
    size = mesh.world.size
    mine = slice(mesh.rank * TOKENS // size, (mesh.rank + 1) * TOKENS // size)
    if uneven:
        mine = slice(0, TOKENS if mesh.rank == size - 1 else 0)
    generator, experts = torch.Generator().manual_seed(5), choices(kind)
    whole = torch.randn(TOKENS, H, generator=generator, dtype=torch.float64)
    factors = torch.rand(experts.shape, generator=generator, dtype=torch.float64)
    x, weights = whole[mine].requires_grad_(), factors[mine].requires_grad_()
    buckets.zero()
    y = layer(x, experts[mine], weights)
    y.square().sum().backward()
    buckets.finish()
    gradients = {n: g.clone() for n, g in gather_all(buckets.gradients(), mesh.world).items()}
    assert x.grad is not None
    assert weights.grad is not None
    return y.detach(), x.grad, weights.grad, gradients


LAYOUTS = [
    (2, "dp=2,ep=2"),
    (2, "dp=2,etp=2"),
    (4, "dp=4,ep=2,etp=2"),
    (4, "dp=4,ep=4"),
    (4, "tp=2,dp=2,ep=2,etp=1"),
]


@pytest.fixture(scope="module")
def alone() -> list[Result]:
    return measure("dp=1", "all-to-all")


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_every_layout_equals_one_process(
    ranks: RankPool, alone: list[Result], world: int, layout: str, dispatcher: str
) -> None:
    """U39's kinds: all to one expert, a rank without tokens, every expert chosen, ep = experts.

    And choices that go nowhere. Outputs, gradients of tokens, weights and parameters: an idle
    expert's are zero.
    """
    found = ranks.run(measure, world, layout, dispatcher)
    names = {f"grad/experts.{n}.{k}" for n in ("gate", "up", "down") for k in ("weight", "bias")}
    for index, (kind, _) in enumerate(CASES):
        wanted, of_ranks = alone[index], [of_rank[index] for of_rank in found]
        for i in range(3):
            torch.testing.assert_close(torch.cat([one[i] for one in of_ranks]), wanted[i])
        gradients = of_ranks[0][3]
        assert names == gradients.keys() == wanted[3].keys()
        for name, want in wanted[3].items():
            torch.testing.assert_close(gradients[name], want)
            assert want.shape[0] == E
            if kind == "one":
                assert want[0].any()
                assert not gradients[name][1:].any()
            if kind == "dropped":
                assert not gradients[name][2].any()
            assert want.any() == (kind != "nothing")


def test_one_process_by_plain_arithmetic(alone: list[Result]) -> None:
    """What the others are compared with: Σ weight · expert(x), in both dispatchers."""
    layer = Layer(Group.single(), Group.single(), "all-to-all")
    specs = param_specs(layer, tp=Group.single(), sequence_parallel=False, prefix="experts")
    initialise(dict(layer.named_parameters()), specs, RngKey(3))
    gate_up, down = layer.gate_up, layer.down
    with torch.no_grad():
        gate_up.bias += 0.5
        down.bias += 0.5
    for index, (kind, _) in enumerate(CASES):
        generator, experts = torch.Generator().manual_seed(5), choices(kind)
        x = torch.randn(TOKENS, H, generator=generator, dtype=torch.float64)
        weights = torch.rand(experts.shape, generator=generator, dtype=torch.float64)
        want = torch.zeros_like(x)
        for token, row in enumerate(experts.tolist()):
            for choice, e in enumerate(row):
                if e >= 0:
                    gate, up = (gate_up.weight[e] @ x[token] + gate_up.bias[e]).chunk(2)
                    out = down.weight[e] @ (gate.sigmoid() * up) + down.bias[e]
                    want[token] += weights[token, choice] * out.detach()
        torch.testing.assert_close(alone[index][0], want)
        other = Layer(Group.single(), Group.single(), "all-gather")
        other.load_state_dict(layer.state_dict())
        torch.testing.assert_close(other(x, experts, weights), want)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_overlap_changes_no_bit(ranks: RankPool, dispatcher: str) -> None:
    layout = "dp=4,ep=2,etp=2"
    on = ranks.run(measure, 4, layout, dispatcher)
    off = ranks.run(measure, 4, layout, dispatcher, overlap=False)
    for mine, theirs in zip(on, off, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert all(torch.equal(one[i], other[i]) for i in range(3))
            assert all(torch.equal(one[3][name], other[3][name]) for name in one[3])


def test_experts_and_widths_that_do_not_fit() -> None:
    three = Group(0, 3, (0, 1, 2))
    with pytest.raises(ValueError, match=r"4 experts cannot be dealt out over ep=3.*1, 2, 4"):
        AllToAll(4, ep=three, etp=Group.single())
    with pytest.raises(ValueError, match=r"AllGather: 4 experts cannot be dealt out.*1, 2, 4"):
        AllGather(4, ep=three, etp=Group.single())
    with pytest.raises(ValueError, match=r"4 experts cannot be dealt out over ep=3.*1, 2, 4"):
        ExpertRowLinear(4, 6, 6, ep=three)
    with pytest.raises(ValueError, match="part 'up' of 8 features cannot be cut over etp=3"):
        ExpertColumnLinear(4, 6, [Part("gate", 6), Part("up", 8)], etp=three)
    with pytest.raises(ValueError, match=r"input of 8 features.*valid etp: 1, 2, 4, 8"):
        ExpertRowLinear(4, 8, 6, etp=three)


def halves(dispatcher: str, device: str) -> list[tuple[Tensor, ...]]:
    """My half of the tokens of each case, over two ranks; all of them in one process."""
    mesh = ParallelMesh.single()
    if dist.is_initialized():
        made = ParallelMesh.create(ParallelConfig.parse("dp=2,ep=2"), device=device)
        assert made is not None
        mesh = made
    layer = Layer(mesh.ep, mesh.etp, dispatcher).to(mesh.device)
    specs = param_specs(layer, tp=mesh.tp, sequence_parallel=False, prefix="experts")
    initialise(dict(layer.named_parameters()), specs, RngKey(3))
    size, found = mesh.world.size, []
    mine = slice(mesh.rank * TOKENS // size, (mesh.rank + 1) * TOKENS // size)
    for kind, _ in CASES:
        generator, experts = torch.Generator().manual_seed(5), choices(kind)[mine]
        x = torch.randn(TOKENS, H, generator=generator, dtype=torch.float64)[mine]
        x = x.to(mesh.device).requires_grad_()
        weights = torch.full(experts.shape, 0.5, dtype=torch.float64, device=mesh.device)
        y = layer(x, experts.to(mesh.device), weights)
        y.square().sum().backward()
        assert x.grad is not None
        found.append((y.detach().cpu(), x.grad.cpu()))
    mesh.close()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_gpus_equal_the_cpu(ranks: RankPool, dispatcher: str) -> None:
    found = ranks.run(halves, 2, dispatcher, "cuda", device="cuda")
    for index, wanted in enumerate(halves(dispatcher, "cpu")):
        for i, want in enumerate(wanted):
            torch.testing.assert_close(torch.cat([one[index][i] for one in found]), want)

"""Every option of experts gives the same under every layout: outputs, losses, gradients, state."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_models import ModelConfig, TokenBatch
from mcore_models.common.moe import adapt_routers, expert_loads, recorded, replayed
from mcore_parallel import GradientBuckets, ParallelConfig, ParallelMesh, all_reduce
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parent))
from moe_layers import CONFIG, H, batch_of, changed, context_of, make, random, specs_of

DOCUMENTS, LENGTH = 4, 8
TOTAL = DOCUMENTS * LENGTH
OPTIONS: dict[str, ModelConfig] = {
    "deepseek": changed(
        score_function="sigmoid", scaling_factor=2.5, correction_rate=0.05, num_groups=2,
        top_k=2, group_score_experts=2, shared_ffn_size=12, aux_loss_scope="global",
    ),
    "losses": changed(
        score_function="sqrt_softplus", normalise_top_k=False, router_bias=True, jitter=0.1,
        aux_loss_scope=("global", "sequence"), aux_loss_coefficient=(0.1, 0.2),
        z_loss_coefficient=0.3, latent_size=6, shared_ffn_size=4, shared_gate=True,
    ),
    "probability": changed(capacity_factor=0.7, pad_to_capacity=True),
    "position": changed(capacity_factor=0.9, drop_policy="position"),
    "batch": changed(
        capacity_factor=0.8, capacity_scope="micro_batch", pad_to_capacity=True,
        aux_loss_scope="micro_batch",
    ),
    "sinkhorn": changed(expert_choice="sinkhorn"),
    "balanced": changed(expert_choice="balanced", capacity_factor=0.75, drop_policy="position"),
}  # fmt: skip
OF_MICRO_BATCHES = {"batch", "sinkhorn"}  # whose result depends on what a replica's are
Result = dict[str, Any]


def my_rows(mesh: ParallelMesh) -> tuple[Tensor, TokenBatch]:
    """The tokens whose hidden states I hold; documents dealt over dp, cut over cp and tp."""
    mask = torch.ones(TOTAL, dtype=torch.float64)
    mask[[2, 3, 9, 15, 16, 17, 18, 30]] = 0
    cp, length = mesh.cp, LENGTH // mesh.cp.size
    whole = torch.arange(TOTAL).view(mesh.dp.size, -1, cp.size, length)
    rows = whole[mesh.dp.rank, :, cp.rank].flatten()
    bounds = list(range(0, len(rows) + 1, length))
    batch = batch_of(mask[rows], bounds, rows)
    batch.positions.copy_(rows % LENGTH)
    return rows, batch


def measure(layout: str) -> dict[str, Result]:
    parallel = ParallelConfig.parse(layout)
    mesh = ParallelMesh.create(parallel) if dist.is_initialized() else ParallelMesh.single()
    assert mesh is not None
    names = [name for name in OPTIONS if mesh.dp.size == 1 or name not in OF_MICRO_BATCHES]
    found = {name: measure_one(OPTIONS[name], mesh) for name in names}
    mesh.close()
    return found


def measure_one(config: ModelConfig, mesh: ParallelMesh) -> Result:
    layer = make(config, mesh)
    specs = specs_of(layer, mesh)
    buckets = GradientBuckets(dict(layer.named_parameters()), specs, mesh)
    buckets.zero()
    rows, batch = my_rows(mesh)
    context = context_of(config, batch, 24.0)
    assert batch.loss_mask is not None
    mask = batch.loss_mask
    if mesh.config.sequence_parallel:
        part = slice(mesh.tp.rank * len(rows) // 2, (mesh.tp.rank + 1) * len(rows) // 2)
        rows, mask = rows[part], mask[part]
    hidden = random(TOTAL, H)[rows].requires_grad_()
    out = layer(hidden, context)
    direction = random(TOTAL, H, seed=1)[rows] * mask[:, None]
    ((out * direction).sum() / 24).backward()
    buckets.finish()
    auxiliary = context.auxiliary
    assert auxiliary is not None
    loads = expert_loads(layer, auxiliary, mesh)
    adapt_routers(layer, loads)
    imbalance = torch.tensor(list(loads.imbalance(mesh, [0]).values()))
    kept = {n: p for n, p in layer.named_parameters() if not p.requires_grad}
    everywhere = {
        name: LayoutTensor(p.detach(), specs[name].layout.replicated(*place(mesh)))
        for name, p in kept.items()
    }
    assert hidden.grad is not None
    return {
        "rows": rows,
        "out": out.detach(),
        "dx": hidden.grad,
        "losses": {n: float(all_reduce(s, mesh.world)) for n, s in auxiliary.shares().items()},
        "gradients": clones(gather_all(buckets.gradients(), mesh.world)),
        "loads": loads.by_layer[0],
        "imbalance": float(all_reduce(imbalance, mesh.world)),
        "state": clones(gather_all(everywhere, mesh.world)),
        "mine": {n: p.detach().clone() for n, p in kept.items()},
    }


def place(mesh: ParallelMesh) -> tuple[int, int]:
    return mesh.dp_cp.rank, mesh.dp_cp.size


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Result]:
    return measure("tp=1")


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "tp=2"),
        (2, "tp=2,ep=2,etp=1,sp"),
        (2, "cp=2,ep=2"),
        (2, "dp=2,ep=2,dispatch=all-gather"),
        (4, "tp=2,cp=2,ep=2,sp,dispatch=all-gather"),
        (4, "tp=2,dp=2,ep=4,etp=1,overlap=0"),
        (4, "dp=2,cp=2,ep=2"),
    ],
)
def test_every_option_equals_one_process(
    ranks: RankPool, alone: dict[str, Result], world: int, layout: str
) -> None:
    """U36 and U38 over tp, cp, ep and dp: what experts take, and what routers learn, too."""
    found = ranks.run(measure, world, layout)
    for name in found[0]:
        want = alone[name]
        for mine in (of_rank[name] for of_rank in found):
            torch.testing.assert_close(mine["out"], want["out"][mine["rows"]], msg=name)
            torch.testing.assert_close(mine["dx"], want["dx"][mine["rows"]], msg=name)
            assert mine["losses"] == pytest.approx(want["losses"], rel=1e-10), name
            assert torch.equal(mine["loads"], want["loads"]), name
            assert mine["imbalance"] == want["imbalance"] >= 1
            assert mine["mine"].keys() == want["mine"].keys()
            for key, value in want["mine"].items():
                assert torch.equal(mine["mine"][key], value), (name, key)
        gradients = found[0][name]["gradients"]
        assert gradients.keys() == want["gradients"].keys()
        for key, value in want["gradients"].items():
            torch.testing.assert_close(gradients[key], value, msg=f"{name} {key}")
        assert found[0][name]["state"].keys() == want["state"].keys()


def test_the_options_do_something(alone: dict[str, Result]) -> None:
    plain = measure_one(CONFIG, ParallelMesh.single())
    for name, found in alone.items():
        assert not torch.equal(found["out"], plain["out"]), name
    assert set(alone["deepseek"]["state"]) == {"moe.router.correction", "moe.router.load"}
    assert set(alone["losses"]["losses"]) == {
        *("moe_balance_loss_global", "moe_balance_loss_sequence", "moe_z_loss"),
    }
    names = {name.removeprefix("grad/moe.") for name in alone["losses"]["gradients"]}
    assert names == {
        *("router.weight", "router.bias", "latent_down.weight", "latent_up.weight"),
        *(f"{where}.{part}.weight" for where in ("experts", "shared") for part in WIDE),
        "shared_gate.weight",
    }


WIDE = ("gate", "up", "down")


def choose_and_choose_again(layout: str) -> Tensor:
    """Outputs of another router for my tokens, by choices that all ranks recorded together."""
    mesh = ParallelMesh.single()
    if dist.is_initialized():
        made = ParallelMesh.create(ParallelConfig.parse(layout))
        assert made is not None
        mesh = made
    old, new = make(CONFIG, mesh), make(CONFIG, mesh)
    with torch.no_grad():
        new.router.weight += 0.5 * random(*new.router.weight.shape, seed=7)
    rows, batch = my_rows(mesh)
    hidden, context = random(TOTAL, H)[rows], context_of(CONFIG, batch, 24.0)
    with recorded(old) as record:
        old(hidden, context)
    whole = record.gathered(mesh.world)
    assert torch.equal(whole.find(0, torch.arange(TOTAL)), old.router(random(TOTAL, H)).experts)
    with replayed(new, whole):
        out: Tensor = new(hidden, context)
    mesh.close()
    result = torch.zeros(TOTAL, H, dtype=torch.float64)
    result[rows] = out.detach()
    return result


def test_choices_are_replayed_over_ranks(ranks: RankPool) -> None:
    want = choose_and_choose_again("tp=1")
    for world, layout in [(2, "tp=2"), (2, "cp=2,ep=2")]:
        found = torch.stack(ranks.run(choose_and_choose_again, world, layout))
        copies = world if "tp" in layout else 1
        torch.testing.assert_close(found.sum(0) / copies, want)

"""Training with experts: idle ones, packed documents, checkpoints between layouts, logs."""

import dataclasses
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import mcore_ckpt
from mcore_models.common.moe import RoutedTokens, Router, Routing
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import read_metrics
from mcore_train.config import TrainConfig
from mcore_train.load import config_to_tree
from mcore_train.parity import (
    LEAST_MARGIN,
    Record,
    comparable,
    compare,
    record,
    record_rank,
    world_size,
)
from mcore_train.pretrain import pretrain, run_rank

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy, write_tokens

STEPS = 3
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 24, "aux_loss_coefficient": 0.05}
PATTERN = ["*E", "*-", "*E", ".E"]
DRESSES: dict[str, dict[str, Any]] = {
    "llama": {"moe": MOE},
    # biases of experts, tied embeddings, the other activation, scores that do not add up to 1
    "gpt2": {
        **GPT2_DRESS,
        "moe": {**MOE, "aux_loss_scope": "micro_batch", "normalise_top_k": False},
    },
}


def moe_toy(dress: str = "llama", model: dict[str, Any] | None = None, **fields: Any) -> Any:
    # Weights, and a seed, with which experts that compete have clearly different scores.
    shared = {"pattern": PATTERN, "init_std": 0.1, "dropout": 0.1}
    return toy(model={**shared, **DRESSES[dress], **(model or {})}, seed=6, **fields)


Reference = tuple[TrainConfig, Record]


@pytest.fixture(scope="module")
def reference() -> Callable[..., Reference]:
    """The config of a dress, and its run in one process; each is made once."""

    @cache
    def of(dress: str, global_size: int = 4) -> Reference:
        config = comparable(moe_toy(dress, batch={"global_size": global_size}, steps=STEPS))
        found = record(config, ParallelMesh.single(), STEPS)
        assert found is not None
        return config, found

    return of


def test_fewest_ranks_of_a_layout_with_experts() -> None:
    for layout, size in {"ep=2": 2, "tp=2,ep=2": 4, "tp=2,ep=2,etp=1": 2, "tp=4,ep=6,etp=1": 12,
                         "pp=2,ep=3,etp=2": 12, "tp=2": 2, "etp=1": 1}.items():  # fmt: skip
        parallel = ParallelConfig.parse(layout)
        assert world_size(parallel) == size
        parallel.resolve(size)


def packed(prefix: Path, micro_size: int, layout: str = "") -> TrainConfig:
    """Documents of uneven length that attend to themselves only, with some labels masked."""
    data = {
        "mock": False,
        "train": str(prefix),
        "split": "8,2",
        "eod_id": 0,
        "mask_eod_loss": True,
        "reset_positions": True,
        "reset_attention": True,
    }
    batch = {"global_size": 8, "micro_size": micro_size}
    config = moe_toy(data=data, batch=batch, steps=STEPS, model={"dropout": 0.0})
    return dataclasses.replace(comparable(config), parallel=ParallelConfig.parse(layout))


@pytest.mark.parametrize("layout", ["dp=1", "tp=2,ep=2,etp=1,sp"])
def test_micro_batches_of_packed_documents_do_not_matter(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """The balance of each document is its own: micro-batches of eight samples, of two, of one."""
    prefix = write_tokens(tmp_path / "tokens")
    single = record(packed(prefix, 8), ParallelMesh.single(), STEPS)
    assert single is not None
    assert single.margin > LEAST_MARGIN
    parallel = ParallelConfig.parse(layout)
    for micro_size in (1, 2):
        if parallel.dp == 1:
            found = record(packed(prefix, micro_size), ParallelMesh.single(), STEPS)
        else:
            tree = config_to_tree(packed(prefix, micro_size, layout))
            found = ranks.run(record_rank, 2, tree, STEPS, timeout=120)[0]
        assert found is not None
        report = compare(single, found, layout=layout, world_size=2)
        assert report.holds, report.first_failure()


def forced_rank(tree: dict[str, Any] | None, config: TrainConfig | None = None) -> Record | None:
    """`record_rank`, or `record`, of one step in which every token chooses experts 0 and 1."""
    original = Router.forward

    def forward(self: Router, x: Tensor, tokens: RoutedTokens | None = None) -> Routing:
        routing = original(self, x, tokens)
        experts = torch.arange(2).expand_as(routing.experts)
        weights = routing.scores.gather(-1, experts)
        return dataclasses.replace(routing, experts=experts, weights=weights)

    with mock.patch.object(Router, "forward", forward):
        if config is not None:
            return record(config, ParallelMesh.single(), 1)
        assert tree is not None
        return record_rank(tree, 1)


@pytest.mark.parametrize("layout", ["dp=2,ep=2", "tp=2,ep=2,etp=1,sp"])
def test_experts_that_nobody_chooses(
    ranks: RankPool, reference: Callable[..., Reference], layout: str
) -> None:
    """U39: a whole rank's experts are idle; their gradients are zero, all others as on one rank."""
    parallel = ParallelConfig.parse(layout)
    config, _ = reference("llama", 4 * (parallel.dp or 1))
    single = forced_rank(None, config)
    assert single is not None
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(forced_rank, 2, tree, timeout=120)[0]
    report = compare(single, found, layout=layout, world_size=2)
    assert report.holds, report.first_failure()
    for layer in (0, 2, 3):
        gradient = found.gradients[f"layers.{layer}.moe.experts.down.weight"]
        assert gradient[:2].any()
        assert not gradient[2:].any()


def unsynced_rank(tree: dict[str, Any]) -> Record | None:
    """`record_rank` in which nobody sums the routers' gradients over tp."""
    original = Router.param_specs

    def param_specs(self: Router, prefix: str) -> Any:
        specs = original(self, prefix)
        assert all(spec.grad_sync for spec in specs.values())
        return {n: dataclasses.replace(spec, grad_sync=()) for n, spec in specs.items()}

    with mock.patch.object(Router, "param_specs", param_specs):
        return record_rank(tree, 1)


def test_a_router_whose_gradient_is_a_share_is_found(
    ranks: RankPool, reference: Callable[..., Reference]
) -> None:
    config, single = reference("llama")
    tree = config_to_tree(dataclasses.replace(config, parallel=ParallelConfig.parse("tp=2")))
    found = ranks.run(unsynced_rank, 2, tree, timeout=120)[0]
    first = dataclasses.replace(single, losses=single.losses[:1], auxiliary=single.auxiliary[:1])
    report = compare(first, found, layout="tp=2", world_size=2)
    wrong = {d.name for d in report.differences if d.kind == "gradient" and not d.holds}
    assert wrong == {f"layers.{i}.moe.router.weight" for i in (0, 2, 3)}


# --- checkpoints ------------------------------------------------------------------------------


def run_config(folder: Path, layout: str, steps: int, **model: Any) -> TrainConfig:
    config = moe_toy(
        model=model,
        checkpoint={"directory": str(folder)},
        log={"directory": str(folder)},
        schedule={"decay_steps": 5},
        batch={"global_size": 12, "micro_size": 1},
        steps=steps,
    )
    return dataclasses.replace(config, parallel=ParallelConfig.parse(layout))


def run(ranks: RankPool, folder: Path, layout: str, steps: int) -> None:
    config = run_config(folder, layout, steps)
    ranks.run(run_rank, world_size(config.parallel), config_to_tree(config), timeout=120)


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = mcore_ckpt.open(folder / f"step_{step:08d}")
    return {name: checkpoint[name] for name in checkpoint}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config = run_config(folder, "dp=1", 6)
    pretrain(config, nproc=1)
    found = record(config, ParallelMesh.single(), 6)
    assert found is not None
    assert found.margin > LEAST_MARGIN
    return folder


def test_resume_under_the_same_layout_is_bitwise(ranks: RankPool, tmp_path: Path) -> None:
    """U18 with experts: 3 + 3 steps are 6."""
    layout = "dp=2,ep=2"
    run(ranks, tmp_path / "whole", layout, 6)
    run(ranks, tmp_path / "parts", layout, 3)
    run(ranks, tmp_path / "parts", layout, 6)
    ours, theirs = tensors(tmp_path / "parts", 6), tensors(tmp_path / "whole", 6)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
    assert ours["exp_avg/layers.0.moe.experts.gate.weight"].shape == (4, 24, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2,ep=2,etp=1,sp", "dp=1"),
        ("pp=4", "dp=4,ep=4"),
        ("dp=4,ep=2", "dp=3"),
    ],
)
def test_resume_under_another_layout(
    ranks: RankPool, whole: Path, tmp_path: Path, first: str, second: str
) -> None:
    """U43: weights and moments of experts go from any layout to any other.

    The loss of the next step, and weights and moments three steps later, by the metric of parity.
    """
    run(ranks, tmp_path, first, 3)
    run(ranks, tmp_path, second, 6)
    ours, theirs = tensors(tmp_path, 6), tensors(whole, 6)
    assert list(ours) == list(theirs)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        names = [name for name in theirs if name.startswith(f"{kind}/")]
        floor = 1e-3 * sum(float(theirs[n].double().square().sum()) for n in names) ** 0.5
        for name in names:
            delta = float(torch.linalg.vector_norm(ours[name].double() - theirs[name].double()))
            allowed = 1e-5 * max(float(torch.linalg.vector_norm(theirs[name].double())), floor)
            # The square of a gradient has twice its relative error.
            assert delta <= allowed * (2 if kind == "exp_avg_sq" else 1), name
    rows, wanted = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, whole))
    for field, count in {"loss": 6, "moe_balance_loss": 6, "validation_loss": 1}.items():
        values = {row["step"]: row[field] for row in rows if field in row}
        want = {row["step"]: row[field] for row in wanted if field in row}
        assert len(want) == count
        assert {step: values[step] for step in want} == pytest.approx(want, rel=1e-5)


def test_balancing_may_change_when_training_goes_on_but_not_the_experts(
    whole: Path, tmp_path: Path
) -> None:
    def going_on(**moe: Any) -> TrainConfig:
        config = run_config(tmp_path / "new", "dp=1", 7, moe={**MOE, **moe})
        return dataclasses.replace(
            config, checkpoint=dataclasses.replace(config.checkpoint, load=whole)
        )

    with pytest.raises(ValueError, match=r"model.moe.top_k=3, but .* was trained with 2: use 2"):
        pretrain(going_on(top_k=3), nproc=1)
    config = going_on(aux_loss_coefficient=0.0, aux_loss_scope="micro_batch")
    summary = pretrain(config, nproc=1)
    assert (summary.first_step, summary.step) == (6, 7)
    rows = read_metrics(tmp_path / "new" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [7]
    assert not any("moe_balance_loss" in row for row in rows)

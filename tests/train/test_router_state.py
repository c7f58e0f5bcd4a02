"""Routers that learn from counts: the same under every layout, kept in checkpoints, logged."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mcore_ckpt
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
from toy import toy

STEPS = 2
MOE = {
    "num_experts": 8, "top_k": 2, "expert_ffn_size": 24, "score_function": "sigmoid",
    "num_groups": 4, "top_groups": 2, "group_score_experts": 2, "correction_rate": 0.01,
    "scaling_factor": 2.0, "aux_loss_scope": ["global", "sequence"],
    "aux_loss_coefficient": [0.05, 0.01], "z_loss_coefficient": 0.001, "shared_ffn_size": 32,
    "shared_gate": True, "capacity_factor": 1.2, "jitter": 0.01,
}  # fmt: skip
PATTERN = ["*-", "*E", ".E", "*E"]  # the first layer is dense
NAMES = [
    f"model/layers.{i}.moe.router.{name}" for i in (1, 2, 3) for name in ("correction", "load")
]


def config_of(layout: str = "", **fields: Any) -> TrainConfig:
    model = {"pattern": PATTERN, "init_std": 0.1, "dropout": 0.1, "moe": MOE}
    config = toy(model=model, seed=6, batch={"global_size": 8, "micro_size": 2}, **fields)
    return dataclasses.replace(config, parallel=ParallelConfig.parse(layout))


@pytest.fixture(scope="module")
def single() -> Record:
    found = record(comparable(config_of(steps=STEPS)), ParallelMesh.single(), STEPS)
    assert found is not None
    assert found.margin > LEAST_MARGIN
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2,dispatch=all-gather,zero=3",
        "pp=2,dp=2,ep=2,schedule=zb-h1,lanes=2",
        "dp=2,ep=2,zero=2,overlap-experts",
        "tp=2,cp=2,ep=4,etp=1,sp",
    ],
)
def test_what_routers_learn_is_the_same_under_every_layout(
    ranks: RankPool, single: Record, layout: str
) -> None:
    """Losses, gradients, parameters, corrections, loads after two steps, with everything on."""
    parallel = ParallelConfig.parse(layout)
    config = dataclasses.replace(comparable(config_of(steps=STEPS)), parallel=parallel)
    size = world_size(parallel)
    found = ranks.run(record_rank, size, config_to_tree(config), STEPS, timeout=200)[0]
    report = compare(single, found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "parameter"}
    assert {name.removeprefix("model/") for name in NAMES} <= names
    assert found.auxiliary[0].keys() == {
        *("moe_balance_loss_global", "moe_balance_loss_sequence", "moe_z_loss"),
    }


def tensors(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = mcore_ckpt.open(folder / f"step_{step:08d}")
    return {name: checkpoint[name] for name in checkpoint}


def run_config(folder: Path, layout: str, steps: int) -> TrainConfig:
    places = {"checkpoint": {"directory": str(folder)}, "log": {"directory": str(folder)}}
    return config_of(layout, steps=steps, schedule={"decay_steps": 5, "warmup_steps": 1}, **places)


def test_checkpoints_keep_it_and_logs_show_it(ranks: RankPool, tmp_path: Path) -> None:
    """A step over two ranks and two in one process are three; all but the fp32 sums alike."""
    pretrain(run_config(tmp_path / "whole", "", 3), nproc=1)
    config = run_config(tmp_path / "parts", "dp=2,ep=2", 1)
    ranks.run(run_rank, 2, config_to_tree(config), timeout=120)
    pretrain(run_config(tmp_path / "parts", "", 3), nproc=1)
    ours, theirs = tensors(tmp_path / "parts", 3), tensors(tmp_path / "whole", 3)
    assert list(ours) == list(theirs)
    for name, want in theirs.items():
        torch.testing.assert_close(ours[name], want, rtol=1e-4, atol=1e-6, msg=name)
    for name in NAMES:
        assert ours[name].equal(theirs[name]), name
        assert ours[name].dtype == torch.float32
        assert "exp_avg" + name.removeprefix("model") not in ours
        if name.endswith("load"):
            assert float(ours[name].sum()) == pytest.approx(1.0)
        else:  # three steps of 0.01 up or down
            assert (ours[name].abs() < 0.0301).all()
            assert ours[name].any()
    rows = [row for row in read_metrics(tmp_path / "parts" / "metrics.jsonl") if "loss" in row]
    wanted = [row for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "loss" in row]
    for row, want in zip(rows, wanted, strict=True):
        for layer in (1, 2, 3):
            assert 1 <= row[f"moe_imbalance_{layer}"] <= 8
            assert row[f"moe_imbalance_{layer}"] == want[f"moe_imbalance_{layer}"]
        assert "moe_imbalance_0" not in row


def test_the_rate_may_change_when_training_goes_on(tmp_path: Path) -> None:
    """DeepSeek-V3 ends with a rate of 0; from then on corrections stay."""
    pretrain(run_config(tmp_path, "", 1), nproc=1)
    config = run_config(tmp_path, "", 2)
    assert config.model.moe is not None
    moe = dataclasses.replace(config.model.moe, correction_rate=0.0)
    pretrain(dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe)), nproc=1)
    before, after = tensors(tmp_path, 1), tensors(tmp_path, 2)
    name = "model/layers.1.moe.router.correction"
    assert before[name].any()
    assert after[name].equal(before[name])

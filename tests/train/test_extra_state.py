"""What modules keep beside their parameters: in every save, back under every layout, or refused."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mcore_ckpt
from mcore_models import BuildContext, ModelConfig, TokenContext
from mcore_parallel import Group, LayoutTensor, ParallelConfig, TensorLayout
from mcore_parallel.extra import ExtraState
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import read_metrics
from mcore_train.config import TrainConfig
from mcore_train.load import config_to_tree
from mcore_train.pretrain import pretrain, run_rank

sys.path.append(str(Path(__file__).parent))
from toy import toy

CHANNELS = 6


class Fading(nn.Module):
    """Hidden states times a weight, which fades with every pass: what it keeps, its result shows.

    `history` is what all ranks have alike, `channels` is cut over tensor parallelism.
    """

    part_name = "fading"

    def __init__(self, size: int, tp: Group, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size, device=device))
        self.tp, rows = tp, CHANNELS // tp.size
        self.first = rows * tp.rank
        self.history = torch.zeros(3)
        self.channels = torch.arange(float(self.first), self.first + rows)
        self.passes = 0

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            self.history = self.history.roll(1)
            self.history[0] = self.passes
            self.channels += 1
        return hidden @ self.weight / (10 + float(self.history.sum()))

    def extra_state(self) -> ExtraState:
        history = TensorLayout.whole("history", (3,)).replicated(self.tp.rank, self.tp.size)
        channels = TensorLayout.whole("channels", (CHANNELS,))
        mine = channels.slice(0, self.first, self.first + len(self.channels))
        return ExtraState(
            tensors={
                "history": LayoutTensor(self.history, history),
                "channels": LayoutTensor(self.channels, mine),
            },
            values={"passes": self.passes},
        )

    def load_extra_values(self, values: Mapping[str, Any]) -> None:
        assert float(self.history[0]) == values["passes"]  # the tensors come first
        self.passes = values["passes"]


def fading(config: ModelConfig, context: BuildContext, layer_index: int) -> nn.Module:
    return Fading(config.hidden_size, context.tp, torch.device("meta"))


BUILDERS = {"R": fading}


def config_of(folder: Path, layout: str = "", **fields: Any) -> TrainConfig:
    checkpoint = {"directory": str(folder), **fields.pop("checkpoint", {})}
    model = {"pattern": fields.pop("pattern", "R-*-"), "hidden_size": 16, "ffn_size": 16}
    config = toy(
        model=model,
        batch={"micro_size": 1},
        builders=f"{__name__}:BUILDERS",
        checkpoint=checkpoint,
        log={"directory": str(folder)},
        schedule={"decay_steps": 4, "warmup_steps": 0},
        **fields,
    )
    return dataclasses.replace(config, parallel=ParallelConfig.parse(layout))


def run_here(tree: dict[str, Any]) -> int:
    return run_rank(tree).step


def train(ranks: RankPool, folder: Path, layout: str, **fields: Any) -> None:
    config = config_of(folder, layout, **fields)
    world = 2 if layout else 1
    assert set(ranks.run(run_here, world, config_to_tree(config))) == {config.steps}


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    pretrain(config_of(folder, steps=4), nproc=1)
    return folder


@pytest.mark.parametrize(("before", "after"), [("tp=2", "pp=2"), ("pp=2", "tp=2")])
def test_a_run_goes_on_with_what_its_modules_kept(
    ranks: RankPool, whole: Path, tmp_path: Path, before: str, after: str
) -> None:
    """A module that is cut otherwise, or on another stage, has the values it was saved with."""
    train(ranks, tmp_path, before, steps=2)
    train(ranks, tmp_path, after, steps=4)
    ours, theirs = mcore_ckpt.open(tmp_path), mcore_ckpt.open(whole)
    name = "layers.0.fading"
    assert ours.state["extra"] == theirs.state["extra"] == {name: {"passes": 16}}
    for key in ("history", "channels"):
        assert ours[f"extra/{name}/{key}"].equal(theirs[f"extra/{name}/{key}"])
    assert ours[f"extra/{name}/history"].tolist() == [16, 15, 14]
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-5)


def test_replicas_keep_it_once_and_local_saves_have_it(ranks: RankPool, tmp_path: Path) -> None:
    """Two replicas of a module are one state; in the background and on the machines, too."""
    local = {"local": str(tmp_path / "fast"), "local_interval": 1, "asynchronous": True}
    train(ranks, tmp_path / "run", "dp=2", steps=2, checkpoint=local)
    state = mcore_ckpt.open(tmp_path / "run")
    assert state["extra/layers.0.fading/history"].tolist() == [4, 3, 2]
    for folder in (tmp_path / "run").glob("step_*"):  # what is left is the local save
        (folder / "COMMIT").rename(folder / "UNCOMMITTED")
    fields = {"checkpoint": {**local, "interval": 1}}
    train(ranks, tmp_path / "run", "", steps=3, **fields)
    assert mcore_ckpt.open(tmp_path / "run").state["extra"]["layers.0.fading"]["passes"] in (4, 8)


def test_state_that_no_module_keeps_is_named(whole: Path, tmp_path: Path) -> None:
    """Weights alone leave it out; going on without the module that had it is an error."""
    folder = tmp_path / "weights"
    load = {"load": str(whole), "weights_only": True}
    pretrain(config_of(folder, steps=1, checkpoint=load), nproc=1)
    assert mcore_ckpt.read_state(folder)["extra"]["layers.0.fading"]["passes"] == 4
    step = whole / "step_00000004"
    with pytest.raises(ValueError, match=r"unexpected: .*extra/layers\.0\.fading/channels"):
        mcore_ckpt.load(step, {}, prefixes=["extra/"])

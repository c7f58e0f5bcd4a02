"""Training in fp16: the scale of the loss, what it does to gradients, and its state."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel import ParallelMesh, RngKey
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import Callback, MetricsLog, SaveCheckpoints, read_metrics
from mcore_train.config import LogConfig, TrainConfig
from mcore_train.load import config_to_tree
from mcore_train.optim import LossScaleConfig, LossScaler
from mcore_train.pretrain import run_rank
from mcore_train.session import Session, build_session
from mcore_train.step import Step, StepMetrics
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy

SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_size": 16}


def test_the_scale_grows_and_falls() -> None:
    """After `interval` good steps in a row it grows; after `patience` bad ones it falls."""
    scaler = LossScaler(LossScaleConfig(initial=8.0, interval=3, patience=2, least=2.0))
    steps = "+ + - + + + + + + - - - - - -"
    scales = []
    for sign in steps.split():
        scaler.update(finite=sign == "+")
        scales.append(scaler.scale)
    assert scales == [8, 8, 8, 8, 8, 16, 16, 16, 32, 32, 16, 16, 8, 8, 4]
    assert not scaler.is_least
    for _ in range(6):
        scaler.update(finite=False)
    assert scaler.scale == 2.0
    assert scaler.is_least
    assert LossScaler(LossScaleConfig(growth=1.0, backoff=1.0)).is_least


def test_a_scale_between_powers_falls_to_the_least() -> None:
    scaler = LossScaler(LossScaleConfig(initial=128.0, least=100.0))
    assert not scaler.is_least
    scaler.update(finite=False)
    assert scaler.scale == 100.0
    assert scaler.is_least


def test_counters_beyond_a_shorter_interval() -> None:
    """A run that goes on with less patience, or shorter intervals, than it was begun with."""
    long = LossScaler(LossScaleConfig(initial=64.0, interval=10, patience=5))
    for finite, expected in ((True, 128.0), (False, 32.0)):
        long.load_state_dict({"scale": 64.0, "good": 0, "bad": 0})
        for _ in range(4):
            long.update(finite=finite)
        short = LossScaler(LossScaleConfig(interval=3, patience=2))
        short.load_state_dict(long.state_dict())
        short.update(finite=finite)
        assert short.scale == expected


def test_its_state_comes_back() -> None:
    """U21: the scale and the counters are those of the save, not those of the start."""
    scaler = LossScaler(LossScaleConfig(initial=1024.0, interval=5, patience=2))
    for finite in (False, False, False, False, True, True, True, False, True, True):
        scaler.update(finite=finite)
    assert scaler.scale == 256.0
    other = LossScaler(LossScaleConfig(initial=65536.0, interval=5, patience=2))
    other.load_state_dict(scaler.state_dict())
    for finite in (True, True, False, True, True, True, True, False, False):
        scaler.update(finite=finite)
        other.update(finite=finite)
        assert other.scale == scaler.scale
        assert other.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial": 0.5}, "initial=0.5 must be finite and at least least=1.0"),
        ({"initial": float("inf")}, "initial=inf must be finite"),
        ({"growth": 0.5}, "growth=0.5 must be finite and at least 1"),
        ({"backoff": 2.0}, "backoff=2.0 must lie in 0 < backoff <= 1"),
        ({"interval": 0}, "interval=0 must be at least 1"),
        ({"least": 0.0}, "least=0.0 must be greater than 0"),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(precision="fp16", loss_scale=fields)


def test_a_scale_that_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="it is for precision fp16, and precision=bf16"):
        toy(precision="bf16", loss_scale={"initial": 256.0})


def session_of(**fields: Any) -> Session:
    config = toy(**{"model": SMALL, "optimizer": {"kind": "sgd", "weight_decay": 0.0}, **fields})
    return build_session(config, ParallelMesh.single())


def gradients(session: Session) -> tuple[float, dict[str, torch.Tensor]]:
    step = Step(session)
    shares = step.accumulate(next(session.data.batches()), RngKey(1))
    found = {name: held.tensor / step.scale for name, held in session.buckets.gradients().items()}
    return float(shares.loss), found


EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8}


def test_small_gradients_survive() -> None:
    """A gradient that fp16 cannot hold is there with a scale, and gone without."""
    tiny = {"initial": 2.0**-12, "least": 2.0**-12}
    loss, exact = gradients(session_of())
    scaled_loss, scaled = gradients(session_of(precision="fp16", loss_scale={"initial": 2.0**14}))
    _, plain = gradients(session_of(precision="fp16", loss_scale=tiny))
    assert scaled_loss == pytest.approx(loss, rel=2e-3)

    def error(found: dict[str, torch.Tensor]) -> float:
        differences = [(found[name] - value).norm() / value.norm() for name, value in exact.items()]
        return float(torch.stack(differences).mean())

    assert error(scaled) < 5e-3
    assert error(plain) > 20 * error(scaled)


class Watch(Callback):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.steps.append(metrics)


def fp16(folder: Path | None, *, steps: int = 6, **loss_scale: Any) -> TrainConfig:
    return toy(
        steps=steps,
        model=SMALL,
        precision="fp16",
        loss_scale=loss_scale,
        schedule={"decay_steps": 5},
        checkpoint={"directory": None if folder is None else str(folder)},
    )


def run(config: TrainConfig, *callbacks: Callback) -> Trainer:
    trainer = Trainer(
        build_session(config, ParallelMesh.single()),
        [*callbacks, SaveCheckpoints(config.checkpoint)],
    )
    trainer.run()
    return trainer


def test_a_step_that_overflows_lowers_the_scale_alone(tmp_path: Path) -> None:
    """No weight and no moment changes, the sample is used up, and training goes on."""
    config = fp16(tmp_path, initial=2.0**30)
    watch = Watch()
    log = MetricsLog(LogConfig(directory=tmp_path, interval=1, tensorboard=False))
    trainer = run(config, log, watch)
    scales = [metrics.extra["loss_scale"] for metrics in watch.steps]
    bad = [not math.isfinite(metrics.grad_norm) for metrics in watch.steps]
    assert bad[0]
    assert scales == [2.0 ** (30 - sum(bad[:i])) for i in range(6)]
    assert trainer.session.optimizer.step_count == bad.count(False)
    assert trainer.progress.consumed == 6 * 4
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["grad_norm"] is None for row in rows] == bad
    assert all(row["loss"] > 0 for row in rows)


def test_a_scale_that_cannot_be_lower_ends_the_run(tmp_path: Path) -> None:
    config = fp16(None, initial=2.0**30, least=2.0**28)
    with pytest.raises(FloatingPointError, match=r"update 1: .* the first such gradient is "):
        run(config)


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path) -> None:
    """U21: saved at 256 and about to grow; resumed it is 256, and grows when it would have."""
    options = {"initial": 256.0, "interval": 4}
    straight = Watch()
    run(fp16(tmp_path / "straight", **options), straight)
    run(fp16(tmp_path / "parts", steps=3, **options))
    state = mcore_ckpt.read_state(tmp_path / "parts")["scaler"]
    assert state == {"scale": 256.0, "good": 3, "bad": 0}
    resumed = Watch()
    run(fp16(tmp_path / "parts", initial=65536.0, interval=4), resumed)
    scales = [metrics.extra["loss_scale"] for metrics in straight.steps]
    assert scales == [256, 256, 256, 256, 512, 512]
    assert [metrics.extra["loss_scale"] for metrics in resumed.steps] == scales[3:]
    assert [m.loss for m in resumed.steps] == [m.loss for m in straight.steps[3:]]
    ours, theirs = (mcore_ckpt.open(tmp_path / name) for name in ("parts", "straight"))
    for name in theirs:
        assert ours[name].equal(theirs[name]), name


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_ranks_agree_on_the_scale(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    """Over data, tensor and pipeline parallelism: overflows found on one rank count on all."""
    config = toy(
        steps=5,
        model=SMALL,
        precision="fp16",
        parallel=layout,
        loss_scale={"initial": 2.0**26},
        checkpoint={"directory": str(tmp_path)},
    )
    summaries = ranks.run(run_rank, 2, config_to_tree(config), timeout=120)
    assert [summary.step for summary in summaries] == [5, 5]
    state = mcore_ckpt.read_state(tmp_path)
    lowered = 26 - torch.tensor(state["scaler"]["scale"]).log2().item()
    assert lowered >= 1
    assert state["optimizer"]["step"] == 5 - lowered


def test_losses_of_routers_are_scaled_too() -> None:
    """The gradient of a router is that of fp32, with the share of its balancing loss."""

    def routed(coefficient: float, **fields: Any) -> dict[str, torch.Tensor]:
        moe = {**EXPERTS, "aux_loss_coefficient": coefficient}
        return gradients(
            session_of(model={**SMALL, "pattern": ["*E", "*E"], "moe": moe}, **fields)
        )[1]

    exact, without = routed(5.0), routed(0.0)
    scaled = routed(5.0, precision="fp16", loss_scale={"initial": 4096.0})
    names = [name for name in exact if "router" in name]
    assert names
    for name in names:
        share = (exact[name] - without[name]).norm()
        assert share > 0
        assert (scaled[name] - exact[name]).norm() < 0.2 * share

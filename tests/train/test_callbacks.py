"""What callbacks do around the loop, in whole runs of a small model."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_parallel import ParallelConfig, ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import (
    Callback,
    Evaluate,
    MetricsLog,
    SaveCheckpoints,
    read_metrics,
)
from mcore_train.config import CheckpointConfig, EvaluateConfig, LogConfig, TrainConfig
from mcore_train.load import config_from_tree
from mcore_train.session import build_session
from mcore_train.step import StepMetrics
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy, toy_tree

SMALL = {"num_layers": 1, "hidden_size": 16, "ffn_size": 16}
TOKENS = 4 * 8  # samples of a global batch x their length, all valid


class Events(Callback):
    """Notes what happens; a run that is to break off does so after `fail_after` steps."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.fail_after = fail_after
        self.steps: list[StepMetrics] = []
        self.evaluated: list[tuple[int, float]] = []
        self.saved: list[int] = []
        self.closed = 0

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        if trainer.step == self.fail_after:
            raise InterruptedError("cut off")

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        self.evaluated.append((trainer.step, loss))

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        assert mcore_ckpt.latest(Path(path).parent) == Path(path)  # committed by now
        self.saved.append(step)

    def close(self) -> None:
        self.closed += 1


class Counter(Callback):
    """A user's callback: it remembers the tokens of every step it has seen."""

    name = "counter"

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.at_start: list[int] = []

    def on_start(self, trainer: Trainer) -> None:
        self.at_start = list(self.tokens)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.tokens.append(metrics.tokens * trainer.step)

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tokens = list(state["tokens"])


def small(**fields: Any) -> TrainConfig:
    return toy(**{"model": SMALL, **fields})


def run(config: TrainConfig, *callbacks: Callback) -> Trainer:
    trainer = Trainer(build_session(config, ParallelMesh.single()), callbacks)
    trainer.run()
    return trainer


def cut_off(config: TrainConfig, step: int, *callbacks: Callback) -> None:
    """Run until an error ends it after `step` steps."""
    events = Events(fail_after=step)
    with pytest.raises(InterruptedError):
        run(config, *callbacks, events)
    assert events.closed == 1  # also after an error


def log_config(folder: Path, interval: int = 1) -> LogConfig:
    return LogConfig(directory=folder, interval=interval, tensorboard=False, progress=False)


def steps_of(folder: Path, kind: str) -> list[int]:
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl") if kind in row]


@pytest.mark.parametrize(("interval", "logged"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6, 7])])
def test_metrics_rows(tmp_path: Path, interval: int, logged: list[int]) -> None:
    """Every interval, the first and the last step; each row is what the step returned."""
    events = Events()
    config = small(steps=7)
    run(config, MetricsLog(log_config(tmp_path, interval)), Evaluate(config.evaluate), events)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == logged
    for row in rows[:-1]:
        metrics = events.steps[row["step"] - 1]
        assert row.pop("tokens_per_second") > 0
        assert row == {
            "step": row["step"],
            "loss": metrics.loss,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "tokens": TOKENS,
        }
    assert rows[-1] == {"step": 7, "validation_loss": events.evaluated[0][1]}


def test_no_directory_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(small(steps=2), MetricsLog(LogConfig(tensorboard=False)))
    assert list(tmp_path.iterdir()) == []


def test_after_a_resume_the_metrics_read_like_one_run(tmp_path: Path) -> None:
    """Rows past the checkpoint go, earlier ones stay, and no moment leaves half a file."""
    config = small(steps=6, checkpoint={"directory": str(tmp_path / "c"), "interval": 2})
    file = tmp_path / "metrics.jsonl"
    cut_off(config, 3, MetricsLog(log_config(tmp_path)), SaveCheckpoints(config.checkpoint))
    assert steps_of(tmp_path, "loss") == [1, 2, 3]
    with file.open("a") as out:
        out.write('{"step": 4, "lo')  # what a power cut leaves
    before, held = file.read_bytes(), tmp_path / "held"
    os.link(file, held)
    log = MetricsLog(log_config(tmp_path))
    assert run(config, log, SaveCheckpoints(config.checkpoint)).resumed
    # Rewriting in place would show in the old file, which a reader may have open.
    assert held.read_bytes() == before
    assert file.read_bytes().startswith(before[: before.index(b'{"step": 3')])
    assert steps_of(tmp_path, "loss") == [1, 2, 3, 4, 5, 6]
    assert steps_of(tmp_path, "saved") == [2, 4, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "held", "metrics.jsonl"]


def log_rank(tree: dict[str, Any], folder: str) -> tuple[int, list[float]]:
    """Train with one folder of metrics per rank."""
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    events = Events()
    log = MetricsLog(log_config(Path(folder) / str(mesh.rank)))
    Trainer(build_session(config, mesh), [log, Evaluate(config.evaluate), events]).run()
    mesh.close()
    return mesh.rank, [metrics.loss for metrics in events.steps]


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_rank_0_alone_logs(ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """And what it logs, a mean over all ranks, every rank knows."""
    parallel = ParallelConfig.parse(layout)
    fields = {"dp": parallel.dp, "pp": parallel.pp}
    tree = toy_tree(steps=2, model={**SMALL, "num_layers": 2}, parallel=fields)
    found = ranks.run(log_rank, 2, tree, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    rows = read_metrics(tmp_path / "0" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert found == [(0, losses), (1, losses)]


@pytest.mark.parametrize(
    ("fields", "steps", "evaluated"),
    [
        ({}, 5, [5]),
        ({"interval": 2}, 5, [2, 4, 5]),
        ({"interval": 2}, 4, [2, 4]),
        ({"at_start": True}, 3, [0, 3]),
        ({"interval": 3, "at_start": True}, 3, [0, 3]),
    ],
)
def test_evaluate(fields: dict[str, Any], steps: int, evaluated: list[int]) -> None:
    """At the start if asked, every interval, at the end, and never twice for one step."""
    events = Events()
    config = small(steps=steps)
    trainer = run(config, Evaluate(EvaluateConfig(windows=5, **fields)), events)
    assert [step for step, _ in events.evaluated] == evaluated
    losses = [loss for _, loss in events.evaluated]
    assert losses[-1] == trainer.evaluate()
    assert len(set(losses)) == len(losses)


def test_evaluating_does_not_change_the_training() -> None:
    config = small(steps=4, model={**SMALL, "dropout": 0.1})
    losses = []
    for callbacks in ([], [Evaluate(EvaluateConfig(interval=1, at_start=True))]):
        events = Events()
        run(config, *callbacks, events)
        losses.append([metrics.loss for metrics in events.steps])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("interval", "steps", "saved"),
    [(None, 3, [3]), (2, 5, [2, 4, 5]), (2, 4, [2, 4]), (9, 3, [3])],
)
def test_save_checkpoints(
    tmp_path: Path, interval: int | None, steps: int, saved: list[int]
) -> None:
    """Every interval, at the end, and never twice for one step."""
    events = Events()
    checkpoint = CheckpointConfig(directory=tmp_path, interval=interval)
    run(small(steps=steps), SaveCheckpoints(checkpoint), events)
    assert events.saved == saved
    names = [path.name for path in mcore_ckpt.list_checkpoints(tmp_path)]
    assert names == [f"step_{step:08d}" for step in saved]


def test_what_was_loaded_is_not_saved_again(tmp_path: Path) -> None:
    config = small(steps=3, checkpoint={"directory": str(tmp_path)})
    run(config, SaveCheckpoints(config.checkpoint))
    events = Events()
    trainer = run(config, SaveCheckpoints(config.checkpoint), events)
    assert (trainer.resumed, trainer.step, events.saved) == (True, 3, [])


def test_no_directory_no_checkpoint() -> None:
    events = Events()
    run(small(steps=2), SaveCheckpoints(CheckpointConfig()), events)
    assert events.saved == []


@pytest.mark.parametrize(
    "place",
    [
        "before",
        "after",
    ],
)
def test_the_state_of_a_callback_survives_a_resume(tmp_path: Path, place: str) -> None:
    """Wherever in the list it stands, its state in the checkpoint is that after the saved step."""
    config = small(steps=5, checkpoint={"directory": str(tmp_path), "interval": 2})

    def callbacks(counter: Counter) -> list[Callback]:
        found: list[Callback] = [counter, SaveCheckpoints(config.checkpoint)]
        return found if place == "before" else found[::-1]

    cut_off(config, 3, *callbacks(Counter()))
    state = mcore_ckpt.read_state(tmp_path)
    assert state["callbacks"] == {"counter": {"tokens": [TOKENS, 2 * TOKENS]}}
    counter = Counter()
    run(config, *callbacks(counter))
    assert counter.at_start == [TOKENS, 2 * TOKENS]  # loaded before the start is announced
    assert counter.tokens == [TOKENS * step for step in (1, 2, 3, 4, 5)]


def test_a_callback_without_a_name_keeps_nothing(tmp_path: Path) -> None:
    config = small(steps=2, checkpoint={"directory": str(tmp_path)})
    counter = Counter()
    counter.name = ""
    run(config, counter, SaveCheckpoints(config.checkpoint))
    assert mcore_ckpt.read_state(tmp_path)["callbacks"] == {}

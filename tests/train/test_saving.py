"""Saving during a run: in the background, with errors, and going on from what is whole."""

import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import CheckpointError, ChunkData, Storage, Writing
from mcore_ckpt.file_engine import FileEngine
from mcore_ckpt.local.share import read_share
from mcore_parallel import ParallelMesh, init_from_env
from mcore_parallel.testing import RankPool
from mcore_train.callbacks import Callback, MetricsLog, SaveCheckpoints, read_metrics
from mcore_train.config import LogConfig, TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import run_rank
from mcore_train.session import build_session
from mcore_train.step import StepMetrics
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy

SMALL = {"num_layers": 1, "hidden_size": 16, "ffn_size": 16, "dropout": 0.1}
write = FileEngine.write


class Disk:
    """Takes the place of the engine's `write`: waits for a gate; is full when a step is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.full: int | None = None
        disk = self

        def writing(engine: FileEngine, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
            assert disk.gate.wait(60)
            chunks = list(chunks)
            if any(chunk.array.startswith(f"step_{disk.full or 0:08d}") for chunk in chunks):
                raise OSError(28, "No space left on device", storage.location(""))
            return write(engine, storage, chunks)

        monkeypatch.setattr(FileEngine, "write", writing)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class At(Callback):
    """Does something after a step, and notes what is told of saves, with the step it is told in."""

    def __init__(self, **actions: Any) -> None:
        self.actions = {int(key.removeprefix("step")): call for key, call in actions.items()}
        self.told: list[tuple[str, int, int]] = []

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.step in self.actions:
            self.actions[trainer.step]()

    def on_save_requested(self, trainer: Trainer, step: int) -> None:
        self.told.append(("requested", step, trainer.step))

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        assert trainer.checkpoint == Path(path)
        assert mcore_ckpt.open(path).step == step
        self.told.append(("completed", step, trainer.step))

    def on_save_failed(self, trainer: Trainer, step: int, error: str) -> None:
        assert f"saving step {step} " in error
        self.told.append(("failed", step, trainer.step))


def config_of(folder: Path, *, steps: int = 6, **checkpoint: Any) -> TrainConfig:
    return toy(
        steps=steps,
        model=SMALL,
        schedule={"decay_steps": 5},
        checkpoint={"directory": str(folder), **checkpoint},
    )


def run(config: TrainConfig, *callbacks: Callback) -> Trainer:
    session = build_session(config, ParallelMesh.single())
    log = MetricsLog(
        LogConfig(directory=config.checkpoint.directory, interval=1, tensorboard=False)
    )
    trainer = Trainer(session, [log, *callbacks, SaveCheckpoints(config.checkpoint)])
    trainer.run()
    return trainer


def contents(path: Path) -> dict[str, torch.Tensor]:
    return dict(mcore_ckpt.open(path))


def assert_equal(ours: Path, theirs: Path) -> None:
    """Tensors bit by bit, and the state but for the places of files."""
    one, other = contents(ours), contents(theirs)
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.equal(other[name]), name
    states = [mcore_ckpt.read_state(path) for path in (ours, theirs)]
    for state in states:
        del state["config"]
    assert states[0] == states[1]


def test_a_save_in_the_background_is_that_of_its_step(tmp_path: Path, disk: Disk) -> None:
    """U48: due at step 2, durable while step 4 runs: all events and rows say 2."""
    disk.gate.clear()
    watch = At(step4=disk.gate.set)
    config = config_of(tmp_path, interval=4, asynchronous=True, steps=7)

    class Early(Callback):
        """Saves at step 2 besides."""

        def after_step(self, trainer: Trainer) -> None:
            if trainer.step == 2:
                saver._save(trainer)

    saver = SaveCheckpoints(config.checkpoint)
    log = MetricsLog(LogConfig(directory=tmp_path, interval=1, tensorboard=False))
    Trainer(build_session(config, ParallelMesh.single()), [log, watch, Early(), saver]).run()
    assert watch.told[:3] == [("requested", 2, 2), ("completed", 2, 4), ("requested", 4, 4)]
    assert watch.told[-1] == ("completed", 7, 7)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    order = [
        (next(key for key in row if key != "step"), row["step"])
        for row in rows
        if "loss" in row or "saved" in row or "save_requested" in row
    ]
    asked, done = order.index(("save_requested", 2)), order.index(("saved", 2))
    assert order[asked:done] == [("save_requested", 2), ("loss", 3), ("loss", 4)]
    saved = [row for row in rows if "saved" in row]
    assert [row["step"] for row in saved] == [2, 4, 7]
    assert saved[0]["saved"].endswith("step_00000002")


def test_what_is_saved_in_the_background_equals_what_is_saved_at_once(tmp_path: Path) -> None:
    """And a run that goes on from it equals one that was never cut (U18)."""
    sync, background = tmp_path / "sync", tmp_path / "async"
    run(config_of(sync, interval=2))
    watch = At()
    trainer = run(config_of(background, interval=2, asynchronous=True, steps=4), watch)
    assert trainer.checkpoint == background / "step_00000004"
    told = [(what, step) for what, step, _ in watch.told]
    assert told == [(w, s) for s in (2, 4) for w in ("requested", "completed")]
    resumed = run(config_of(background, interval=2, asynchronous=True))
    assert resumed.resumed
    for step in (2, 4, 6):
        name = f"step_{step:08d}"
        assert_equal(background / name, sync / name)


def test_two_ranks_save_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    """The same on two ranks, whose exchange runs beside the reductions of training."""
    for folder, asynchronous in (("sync", False), ("async", True)):
        config = toy(
            model=SMALL,
            steps=5,
            parallel={"dp": 2},
            checkpoint={
                "directory": str(tmp_path / folder),
                "interval": 1,
                "keep_last": 2,
                "keep_every": 2,
                "asynchronous": asynchronous,
            },
        )
        ranks.run(run_rank, 2, config_to_tree(config), timeout=120)
    names = [path.name for path in mcore_ckpt.list_checkpoints(tmp_path / "async")]
    assert names == ["step_00000002", "step_00000004", "step_00000005"]
    for name in names:
        assert_equal(tmp_path / "async" / name, tmp_path / "sync" / name)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_ends_the_run(tmp_path: Path, disk: Disk, asynchronous: bool) -> None:
    """The error says what to do, and the checkpoint before is intact."""

    disk.full = 4
    with pytest.raises(CheckpointError, match=r"saving step 4 .*No space left.*free space there"):
        run(config_of(tmp_path, interval=2, asynchronous=asynchronous))
    assert [p.name for p in mcore_ckpt.list_checkpoints(tmp_path)] == ["step_00000002"]
    assert not mcore_ckpt.verify(tmp_path).problems
    assert not list(tmp_path.glob("step_00000004*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_may_go_on(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    """With `on_error: continue`: the next save is tried again, and the last one has to succeed."""

    options: dict[str, Any] = {
        "interval": 2,
        "asynchronous": asynchronous,
        "on_error": "continue",
        "keep_last": 1,
    }
    watch, disk.full = At(), 4
    run(config_of(tmp_path / "a", steps=7, **options), watch)
    told = [(what, step) for what, step, _ in watch.told]
    assert ("failed", 4) in told
    assert ("completed", 4) not in told
    assert told[-2:] == [("requested", 7), ("completed", 7)]
    assert [p.name for p in mcore_ckpt.list_checkpoints(tmp_path / "a")] == ["step_00000007"]
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows if "save_failed" in row] == [4]
    assert "training goes on" in capsys.readouterr().err
    disk.full = 3
    with pytest.raises(CheckpointError, match="saving step 3 "):
        run(config_of(tmp_path / "b", steps=3, **options))


def test_a_save_that_failed_at_the_last_step_is_tried_again(tmp_path: Path, disk: Disk) -> None:
    """A step whose save by the interval failed is not taken for saved at the end."""
    disk.full = 2

    class Empty(Callback):
        def on_save_failed(self, trainer: Trainer, step: int, error: str) -> None:
            disk.full = None

    run(config_of(tmp_path, steps=2, interval=2, on_error="continue"), Empty())
    assert mcore_ckpt.open(tmp_path).step == 2


def stop_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "newest"), [(FloatingPointError("nan"), 2), (KeyboardInterrupt(), None)]
)
def test_a_save_under_way_when_the_run_ends_by_an_error(
    tmp_path: Path, disk: Disk, error: BaseException, newest: int | None
) -> None:
    """It is finished, since it is the newest state there is; at once after Ctrl-C, abandoned."""
    disk.gate.clear()

    def end() -> None:
        threading.Timer(0.3, disk.gate.set).start()
        stop_with(error)

    with pytest.raises(type(error)):
        run(config_of(tmp_path, interval=2, asynchronous=True), At(step3=end))
    found = mcore_ckpt.find(tmp_path)
    assert (found.step if found else None) == newest
    assert len(list(tmp_path.glob("step_*"))) == (0 if newest is None else 1)


def test_a_run_goes_on_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    run(config_of(tmp_path, interval=2, steps=4))
    chunk = next((tmp_path / "step_00000004" / "exp_avg").rglob("c.0*"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="step_00000004 is damaged and passed over"):
        trainer = run(config_of(tmp_path, steps=5))
    assert trainer.resumed
    assert trainer.step == 5
    with pytest.raises(CheckpointError, match="step_00000004"):
        run(toy(model=SMALL, checkpoint={"load": str(tmp_path / "step_00000004")}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"asynchronous": True}, "asynchronous saving needs checkpoint.directory"),
        ({"keep_every": 5}, "keep_every=5 needs checkpoint.directory"),
        ({"keep_every": 0, "directory": "x"}, "keep_every=0 must be at least 1"),
        ({"on_error": "ignore"}, "on_error"),
        ({"scan": "deep"}, "scan"),
        ({"local": "x", "directory": "x"}, "local=x and local_interval=None: give both"),
        ({"local": "x", "local_interval": 1}, "local=x needs checkpoint.directory, too"),
        ({"local_copies": -1}, "local_copies=-1 must be at least 0"),
    ],
)
def test_mistakes_in_the_config(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(checkpoint=fields)


def cut(config: TrainConfig, step: int) -> None:
    """Run until an error ends it in this step, before anything of it is saved."""
    with pytest.raises(InterruptedError):
        run(config, At(**{f"step{step}": lambda: stop_with(InterruptedError("cut"))}))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_from_the_newest_of_local_and_shared(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Step 4 is in the directory, 5 on the machine: from 5 on the run is as if never cut."""
    whole, parts, local = tmp_path / "whole", tmp_path / "parts", tmp_path / "local"
    run(config_of(whole))
    options: dict[str, Any] = {
        "interval": 4,
        "local": str(local),
        "local_interval": 1,
        "asynchronous": asynchronous,
    }
    cut(config_of(parts, **options), 6)
    assert mcore_ckpt.open(parts).step == 4
    assert len(list(local.iterdir())) == 1
    trainer = run(config_of(parts, **options))
    assert trainer.resumed_locally
    assert_equal(parts / "step_00000006", whole / "step_00000006")
    rows = read_metrics(parts / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows if "saved_locally" in row} >= {1, 2, 3}
    again = run(config_of(parts, **options))  # the shared one is newest now
    assert again.resumed
    assert not again.resumed_locally


@pytest.mark.parametrize("written", ["run", "link"])
def test_a_directory_may_be_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Relative to where the run is started, then absolute, or through a link: it is one run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    options: dict[str, Any] = {"local": "local", "local_interval": 1}
    cut(config_of(Path("run"), steps=3, **options), 3)
    assert run(config_of(tmp_path / written, steps=3, **options)).resumed_locally


def test_local_saves_that_do_not_count(tmp_path: Path) -> None:
    """Those of another run, damaged ones, and any without `resume`."""
    local = tmp_path / "local"
    options: dict[str, Any] = {"local": str(local), "local_interval": 1}
    cut(config_of(tmp_path / "a", interval=2, **options), 4)
    with pytest.warns(
        RuntimeWarning, match="local save of step 3 .* of the run in .*/a, this .*/b"
    ):
        other = run(config_of(tmp_path / "b", steps=2, local=str(local), local_interval=9))
    assert not other.resumed
    (share,) = local.iterdir()
    data = bytearray(share.read_bytes())
    data[read_share(share).tensors["model/final_norm.weight"]["offset"]] ^= 1
    share.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="the local save is passed over: .* is damaged"):
        trainer = run(config_of(tmp_path / "a", interval=2, **options))
    assert trainer.resumed
    assert not trainer.resumed_locally
    assert mcore_ckpt.open(tmp_path / "a").step == 6


class StopOn(Callback):
    """One rank asks to stop after a step, as a signal does."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.session.mesh.rank == self.rank and trainer.step == self.step:
            trainer.stop_requested = True


def stop_one(tree: dict[str, Any]) -> tuple[int, int | None]:
    """Train as one rank, of which the second one asks to stop; return step and newest saved."""
    config = config_from_tree(tree)
    init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel)
    assert mesh is not None
    callbacks = [StopOn(1, 3), SaveCheckpoints(config.checkpoint)]
    trainer = Trainer(build_session(config, mesh), callbacks)
    trainer.run()
    found = mcore_ckpt.find(tmp) if (tmp := config.checkpoint.directory) else None
    mesh.close()
    return trainer.step, found.step if found else None


def test_a_stop_while_saves_are_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    """U22: asked on one of two ranks, both end after one step, which is saved when they return."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fields: dict[str, Any] = {"model": SMALL, "parallel": {"dp": 2}, "schedule": {"decay_steps": 5}}
    options = {"interval": 1, "asynchronous": True}
    tree = config_to_tree(toy(**fields, checkpoint={"directory": str(parts), **options}))
    assert ranks.run(stop_one, 2, tree) == [(4, 4), (4, 4)]  # known to all with the next step
    ranks.run(run_rank, 2, tree, timeout=120)
    tree = config_to_tree(toy(**fields, checkpoint={"directory": str(whole)}))
    ranks.run(run_rank, 2, tree, timeout=120)
    assert_equal(parts / "step_00000006", whole / "step_00000006")


def test_whoever_removes_checkpoints_goes_back(tmp_path: Path) -> None:
    """A local save does not bring back what came after a checkpoint that was removed."""
    local = tmp_path / "local"
    options: dict[str, Any] = {"interval": 2, "local": str(local), "local_interval": 1}
    cut(config_of(tmp_path, **options), 6)
    assert [p.name for p in mcore_ckpt.list_checkpoints(tmp_path)][-1] == "step_00000004"
    shutil.rmtree(tmp_path / "step_00000004")
    with pytest.warns(RuntimeWarning, match="local save of step 5 .* followed step 4, which is no"):
        trainer = run(config_of(tmp_path, steps=3, **options))
    assert not trainer.resumed_locally
    assert trainer.resumed
    assert mcore_ckpt.open(tmp_path).step == 3


def test_what_ends_a_run_is_not_hidden_by_a_save_that_fails(
    tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.full = 2
    disk.gate.clear()

    def end() -> None:
        disk.gate.set()
        stop_with(FloatingPointError("nan"))

    with pytest.raises(FloatingPointError, match="nan"):
        run(config_of(tmp_path, interval=2, asynchronous=True), At(step3=end))
    assert "saving step 2 " in capsys.readouterr().err
    saver = SaveCheckpoints(config_of(tmp_path, asynchronous=True).checkpoint)
    saver.saver = mcore_ckpt.AsyncSaver()
    saver.saver.save(tmp_path, step=2, tensors={}, state={"bad": {1}})
    with pytest.raises(ValueError, match="is a set"):
        saver.close()

"""Mistakes that would cost hours are refused before anything runs."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

import mcore_ckpt
from mcore_train.callbacks import Callback, read_metrics
from mcore_train.cli import main
from mcore_train.config import EvaluateConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import comparable
from mcore_train.pretrain import check_run, default_callbacks, pretrain
from mcore_train.session import build_session
from mcore_train.sources import open_datasets
from mcore_train.state import WhatToLoad, check_same_model
from mcore_train.step import StepMetrics
from mcore_train.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
from toy import toy, toy_tree, write_tokens

from mcore_parallel import ParallelMesh


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "c"
    pretrain(toy(steps=2, checkpoint={"directory": str(folder)}), nproc=1)
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"num_heads": 2}}, "model.num_heads=2, but .* was trained with 4: use 4"),
        ({"model": {"rope_base": 500.0}}, "model.rope_base=500.0, but .* with 10000.0"),
        ({"model": {"attention": {"softcap": 2.0}}}, "attention.softcap=2.0, but .* with None"),
        ({"optimizer": {"kind": "sgd"}}, "optimizer.kind=sgd, but .* with adamw.*weights_only"),
        ({"data": {"mock": True, "seq_length": 16}}, "samples of 8 tokens and data.seq_length=16"),
        ({"checkpoint": {"resume": False}}, "holds step 2 of another run"),
    ],
)
def test_going_on_with_something_else(
    trained: Path, fields: dict[str, dict[str, object]], message: str
) -> None:
    tree = toy_tree(steps=4, **fields)
    tree.setdefault("checkpoint", {})["directory"] = str(trained)
    with pytest.raises(ValueError, match=message) as caught:
        pretrain(config_from_tree(tree), nproc=1)
    assert "\n" not in str(caught.value)
    assert mcore_ckpt.open(trained).step == 2


def test_fields_that_a_checkpoint_does_not_know_are_at_their_defaults() -> None:
    """One written before they were there fits a model that leaves them out, and no other."""
    tree = config_to_tree(toy())
    del tree["model"]["attention"], tree["model"]["norm_place"]
    found = mock.Mock(state={"config": tree}, path="old")
    check_same_model(toy(), found, WhatToLoad())
    changed = toy(model={"norm_place": "both"})
    with pytest.raises(ValueError, match="norm_place=both, but old was trained with pre"):
        check_same_model(changed, found, WhatToLoad())


@pytest.mark.parametrize("name", ["checkpoint", "log"])
def test_folders_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    tree = toy_tree()
    tree.setdefault(name, {})["directory"] = str(tmp_path / "file")
    with pytest.raises(ValueError, match=rf"{name}.directory=.*file cannot be written"):
        pretrain(config_from_tree(tree), nproc=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"schedule": {"lr": float("inf")}}, "lr=inf must be greater than 0 and finite"),
        ({"optimizer": {"momentum": 0.9}}, "momentum=0.9 is SGD's"),
        ({"optimizer": {"kind": "sgd", "beta1": 0.8}}, "beta1=0.8 is AdamW's: use momentum"),
        ({"optimizer": {"kind": "sgd", "beta2": 0.9}}, "beta2=0.9 is AdamW's: use momentum"),
        ({"data": {"train": "x"}}, "data.mock makes random tokens"),
        ({"data": {"split": "9,1"}}, "so data.split=9,1 would not be read"),
        ({"data": {"cache": "x"}}, "so data.cache=x would not be read"),
        ({"data": {"reset_positions": True, "eod_id": 0}}, "so data.reset_positions=True would"),
        (
            {"data": {"mock": False, "train": "x", "validation": "y", "split": "9,1"}},
            "data.split=9,1 would not be read: data.validation=y names",
        ),
        (
            {"data": {"mock": False, "parts": "p.json", "split": "9,1"}},
            "data.split=9,1 would not be read: data.parts=p.json names",
        ),
        ({"parallel": {"lanes": 2}}, "parallel.lanes=2 is for tokens on their way .*: use 1"),
        (
            {"parallel": {"dispatcher": "all-gather"}},
            "parallel.dispatcher=all-gather is for tokens .*: use all-to-all",
        ),
        (
            {"parallel": {"overlap_expert_exchange": True, "ep": 2}},
            "parallel.overlap_expert_exchange is for tokens .*: leave it out",
        ),
        ({"loss": {"label_smoothing": 1.0}}, "loss: label_smoothing=1.0 must lie in 0 <="),
        ({"loss": {"z_loss": -1e-3}}, "loss: z_loss=-0.001 must be at least 0"),
        ({"checkpoint": {"keep_last": 2}}, "keep_last=2 needs checkpoint.directory"),
        ({"checkpoint": {"reset_step": True}}, "reset_step is about checkpoint.load"),
    ],
)
def test_options_that_would_do_nothing(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(**fields)


@pytest.mark.parametrize(
    ("evaluate", "asked"), [({"interval": 2}, "interval=2"), ({"at_start": True}, "at_start")]
)
def test_an_evaluation_needs_something_to_evaluate_on(
    tmp_path: Path, evaluate: dict[str, object], asked: str
) -> None:
    prefix = str(write_tokens(tmp_path / "tokens"))
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps({"train": prefix}))
    places = {
        "data.parts=.*parts.json names no files for it": {"parts": str(parts)},
        "data.split=1,0 leaves no documents for it": {"train": prefix, "split": "1,0"},
    }
    for where, data in places.items():
        config = toy(data={"mock": False, **data}, evaluate=evaluate)
        for check in (lambda c=config: check_run(c, 1), lambda c=config: open_datasets(c)):
            with pytest.raises(ValueError, match=rf"evaluate.{asked} without .*: {where}"):
                check()
        check_run(dataclasses.replace(config, evaluate=EvaluateConfig()), 1)


def test_a_damaged_checkpoint_is_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(trained, folder)
    files = (folder / "step_00000002" / "model").rglob("*")
    chunk = next(path for path in files if path.is_file() and path.name != "zarr.json")
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(bytes(data))
    config = tmp_path / "toy.yaml"
    config.write_text(json.dumps(toy_tree(steps=4)))
    command = ["pretrain", "--config", str(config), "--checkpoint.directory", str(folder)]
    assert main([*command, "--nproc", "1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("mcore-train: ")
    assert "damaged" in err
    assert err.count("\n") == 1


def test_a_finished_run_says_so(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(json.dumps(toy_tree(steps=2)))
    command = ["pretrain", "--config", str(config), "--checkpoint.directory", str(trained)]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("nothing to train: the run is at step 2 already")


def test_damaged_metrics_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{broken\n5\n\xff\n{"loss": 1}\n{"step": 2}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


class _InterruptAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        if trainer.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    config = toy(steps=50, checkpoint={"directory": str(tmp_path)})
    before = signal.getsignal(signal.SIGINT)
    session = build_session(config, ParallelMesh.single())
    Trainer(session, [*default_callbacks(config), _InterruptAt(3)]).run()
    assert mcore_ckpt.open(tmp_path).step in {3, 4}
    assert signal.getsignal(signal.SIGINT) is before


def test_parity_leaves_files_alone(tmp_path: Path) -> None:
    config = comparable(
        toy(checkpoint={"directory": str(tmp_path / "c")}, log={"directory": str(tmp_path / "l")})
    )
    assert config.checkpoint.directory is None
    assert config.log.directory is None

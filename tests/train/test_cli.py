import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mcore_ckpt
from mcore_train.callbacks import read_metrics
from mcore_train.cli import main

sys.path.append(str(Path(__file__).parent))
from toy import toy_tree


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(toy_tree(steps=2)))
    return str(path)


def test_pretrain(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "3", "--checkpoint.directory", str(tmp_path / "c")]
    assert main(["pretrain", "--config", config, *options, "--nproc", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("trained from step 0 to step 3, loss ")
    assert "validation loss" in out
    assert "step_00000003" in out
    state = mcore_ckpt.read_state(tmp_path / "c")
    assert state["config"]["model"]["num_layers"] == 4
    assert state["config"]["steps"] == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["pretrain", "--config", "{config}", "--model.num_layer", "3"], "model.num_layers?"),
        (["pretrain", "--config", "{config}", "--nproc", "3"], "use global_size 6"),
        (["pretrain", "--config", "{config}", "--parallel.tp", "8", "--nproc", "8"], "tp=4"),
        (["pretrain", "--config", "nothing"], "no recipe 'nothing'"),
        (["pretrain", "--config", "{config}", "--data.mock", "false"], "data.train is not set"),
        (["parity", "--config", "{config}", "--layout", "tq=2"], "tq"),
        (["parity", "--config", "{config}", "--layout", "tp=3"], "tp=3"),
    ],
)
def test_mistakes_are_one_line(
    config: str, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(config=config) for part in command]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mcore-train: ")
    assert err.count("\n") == 1
    assert message in err


def test_unknown_option_of_a_command_without_overrides() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["recipes", "--stpes", "3"])


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "quickstart" in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_parity_names_what_differs(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["parity", "--config", config, "--layout", "tp=2,sp", "--train-steps", "1"]
    assert main(command) == 0
    line = capsys.readouterr().out
    assert "tp=2" in line
    assert " on 2: equal (largest: loss " in line


@pytest.mark.slow
def test_torchrun(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same training under torchrun and over local processes."""
    torchrun = Path(sys.executable).parent / "torchrun"
    head = [str(torchrun), "--standalone", "--nproc-per-node", "2", "-m", "mcore_train.cli"]
    options = ["pretrain", "--config", config, "--parallel.tp", "2", "--log.directory"]
    command = [*head, *options, str(tmp_path / "torchrun")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    capsys.readouterr()
    assert main([*options, str(tmp_path / "local"), "--nproc", "2"]) == 0
    for said in (result.stdout, capsys.readouterr().out):
        assert said.count("trained from step 0 to step 2") == 1
    rows = [
        [(r["step"], r.get("loss")) for r in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("torchrun", "local")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3

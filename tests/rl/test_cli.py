"""`mcore-rl train` as it is typed: what it prints, and mistakes in one line."""

import json
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main

sys.path.append(str(Path(__file__).parent))
from small_runs import tree


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    folder = str(tmp_path / "run")
    sections = tree(log={"directory": folder}, checkpoint={"directory": folder})
    path.write_text(json.dumps(sections))  # JSON is YAML
    return path


def test_training_and_having_trained(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--config", str(config_file), "--nproc", "1"]
    assert main([*words, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    rows = (config_file.parent / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward"] for row in map(json.loads, rows) if "reward" in row]
    assert f"step 0 to step 2: reward {rewards[0]:.3f} -> {rewards[1]:.3f}, on held-out" in said
    assert said.count("\n") == 1
    assert main([*words, "--steps=2"]) == 0
    assert capsys.readouterr().out.startswith(
        f"nothing to train: the run is at step 2 already, checkpoint {config_file.parent}"
    )
    assert main([*words, "--steps", "3", "--evaluate.at_start", "false"]) == 0
    assert capsys.readouterr().out.startswith("trained from step 2 to step 3: reward ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout.groups", "4"], "unknown key rollout.groups: did you mean rollout."),
        (["--batch.global_size", "18"], "batch.global_size=18 is not a multiple of"),
        (["--nproc", "3"], "batch.global_size=16 is not a multiple of batch.micro_size=4 x dp=3"),
        (["--tokenizer", "nowhere"], "nowhere: no tokenizer"),
        (["--steps"], "--steps needs a value"),
        (["--seed", "9", "--checkpoint.load", "nowhere"], "checkpoint.load=nowhere: no committed"),
    ],
)
def test_mistakes_take_one_line(
    config_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    nproc = [] if "--nproc" in words else ["--nproc", "1"]
    assert main(["train", "--config", str(config_file), *nproc, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mcore-rl: ")
    assert message in said
    assert said.count("\n") == 1


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "rl_toy" in capsys.readouterr().out.split()
    assert main(["train", "--config", "rl_tai"]) == 2
    assert "did you mean 'rl_toy'" in capsys.readouterr().err


def test_overrides_belong_to_train_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["recipes", "--steps", "3"])
    assert "unrecognized arguments: --steps 3" in capsys.readouterr().err

"""The toy recipe of reinforcement learning, for real: from random weights to a task understood."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mcore_rl import held_out_tasks, make_environment, play

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
RECIPE = ROOT / "recipes" / "rl_toy.yaml"


def command(folder: Path, *arguments: str, timeout: int = 900) -> str:
    result = subprocess.run(
        [str(BIN / arguments[0]), *arguments[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def train(folder: Path, *options: str) -> str:
    return command(folder, "mcore-rl", "train", "--config", str(RECIPE), *options)


def rows(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "rl_toy" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("rl")
    return folder, train(folder)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reward_rises(full: tuple[Path, str]) -> None:
    """From below 0.3 to above 0.8, on training tasks and on tasks that were held out."""
    folder, said = full
    steps = rows(folder, "reward")
    assert [row["step"] for row in steps] == list(range(1, 121))
    rewards = [row["reward"] for row in steps]
    assert fmean(rewards[:10]) < 0.3
    assert fmean(rewards[-10:]) > 0.8
    held_out = [row["held_out_reward"] for row in rows(folder, "held_out_reward")]
    assert len(held_out) == 5
    assert held_out[0] < 0.3
    assert held_out[-1] > 0.8
    assert f"to step 120: reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, on held-out" in said
    assert (folder / "runs" / "rl_toy" / "reward.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trainer_and_engine_agree_at_every_step(full: tuple[Path, str]) -> None:
    """U55: both hold the same weights in fp32, so every ratio is 1 before the update."""
    for row in rows(full[0], "reward"):
        assert 0 <= row["log_prob_difference_mean"] <= row["log_prob_difference_max"] < 1e-4
        assert row["clip_fraction"] == 0
        assert row["kl"] < 1e-8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_last_checkpoint_answers(full: tuple[Path, str]) -> None:
    """What was trained is a checkpoint that `mcore-inference` generates from."""
    environment = make_environment("count_on", digits=8, count=2, base=5)
    tasks = held_out_tasks(400)[-20:]
    prompts = [environment.reset(task) for task in tasks]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    checkpoints = str(full[0] / "runs" / "rl_toy" / "checkpoints")
    answers = command(
        full[0],
        *("mcore-inference", "generate", "--checkpoint", checkpoints, "--json"),
        *("--max-tokens", "2", *asked),
    )
    texts = [json.loads(line)["text"] for line in answers.splitlines()]
    scores = [
        play(environment, lambda o, a, text=text: text, task).total_reward
        for task, text in zip(tasks, texts, strict=True)
    ]
    assert fmean(scores) > 0.8
    assert "nothing to train: the run is at step 120 already, checkpoint" in train(full[0])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_tensor_parallel_processes_earn_the_same(
    full: tuple[Path, str], tmp_path: Path
) -> None:
    """Two processes hold half a trainer and a whole engine each; the first steps are the same."""
    options = ["--nproc", "2", "--parallel.tp", "2", "--steps", "5", "--device", "cpu"]
    train(tmp_path, *options)
    ours = [row["reward"] for row in rows(tmp_path, "reward")]
    assert ours == [row["reward"] for row in rows(full[0], "reward")[:5]]
    assert max(row["log_prob_difference_max"] for row in rows(tmp_path, "reward")) < 1e-4

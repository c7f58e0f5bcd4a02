"""Reinforcement learning as a user first meets it: the recipe, from random weights to the task."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# It can do the task after three quarters of the recipe, whose learning rate is constant.
STEPS = 100 if os.environ.get("NIGHTLY") else 75


def command(folder: Path, *words: str) -> str:
    environment = dict(os.environ)
    if "PYTEST_XDIST_WORKER" not in environment:  # as a user calls it
        environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl")
    recipe = str(ROOT / "recipes" / "rl_toy.yaml")
    command(folder, "mcore-rl", "train", "--config", recipe, "--steps", str(STEPS))
    return folder


def rows(folder: Path, key: str) -> list[dict[str, Any]]:
    lines = (folder / "runs/rl_toy/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


@pytest.mark.slow
def test_it_learns_the_task(trained: Path) -> None:
    """Mean reward from below 0.3 to above 0.8, on its own rollouts and on tasks held out."""
    for key in ("reward", "held_out_reward"):
        rewards = [row[key] for row in rows(trained, key)]
        assert rewards[0] < 0.3, key
        assert min(rewards[-2:]) > 0.8, key
    assert (trained / "runs/rl_toy/reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trainer_and_engine_agree_at_every_step(trained: Path) -> None:
    """The same weights give the same log-probabilities on both sides (the ratio of U55 is 1)."""
    steps = rows(trained, "reward")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert max(row["log_prob_difference_max"] for row in steps) < 1e-5
    assert max(row["log_prob_difference_max"] for row in steps) > 0  # two computations, not one


@pytest.mark.slow
def test_the_checkpoint_answers(trained: Path) -> None:
    """What was learned is in the checkpoint: it goes on from numbers it has never seen."""
    numbers = ["905173", "118840", "730999", "246815"]
    words = [word for number in numbers for word in ("--prompt", number)]
    out = command(
        trained, "mcore-inference", "generate", "--checkpoint", "runs/rl_toy/checkpoints",
        "--max-tokens", "1", "--json", *words,
    )  # fmt: skip
    texts = [json.loads(line)["text"] for line in out.splitlines()]
    right = [
        text == str((int(number) + 1) % 10) for number, text in zip(numbers, texts, strict=True)
    ]
    assert sum(right) >= 3, texts


@pytest.mark.slow
def test_two_tensor_parallel_processes_earn_the_same(trained: Path, tmp_path: Path) -> None:
    """Each has half of the trainer and an engine of its own; the first steps are the same."""
    recipe = str(ROOT / "recipes" / "rl_toy.yaml")
    layout = ("--nproc", "2", "--parallel.tp", "2", "--device", "cpu")
    said = command(tmp_path, "mcore-rl", "train", "--config", recipe, "--steps", "5", *layout)
    assert said.startswith("trained from step 0 to step 5: reward ")
    earned = [row["reward"] for row in rows(tmp_path, "reward")]
    assert earned == [row["reward"] for row in rows(trained, "reward")[:5]]
    assert max(row["log_prob_difference_max"] for row in rows(tmp_path, "reward")) < 1e-5

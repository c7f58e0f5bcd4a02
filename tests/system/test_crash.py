"""Training processes killed at random moments: the newest committed checkpoint always loads."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import run_rank

KILLS = 100 if os.environ.get("NIGHTLY") else 6


def toy_tree(folder: Path, steps: int, *, asynchronous: bool = False) -> dict[str, Any]:
    config = config_from_tree(
        {
            "steps": steps,
            "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4},
            "data": {"mock": True, "seq_length": 8},
            "checkpoint": {
                "directory": str(folder),
                "interval": 1,
                "keep_last": 2,
                "asynchronous": asynchronous,
            },
            # A fixed decay: runs of different length share one schedule.
            "schedule": {"decay_steps": 50},
            "log": {"progress": False},
            "device": "cpu",
        }
    )
    return config_to_tree(config)


def start(tree: dict[str, Any]) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mcore_train.pretrain"])
    process = context.Process(target=run_rank, args=(tree,))
    process.start()
    return process


def newest(folder: Path) -> int:
    path = mcore_ckpt.latest(folder)
    return -1 if path is None else mcore_ckpt.open(path).step


@pytest.mark.slow
@pytest.mark.timeout(40 * KILLS)
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Kill -9 while every step saves, in the background every other time; each restart goes on."""
    rng = random.Random(7)
    crashed = tmp_path / "crashed"
    seen = -1
    for kill in range(KILLS):
        process = start(toy_tree(crashed, steps=100_000, asynchronous=kill % 2 == 1))
        deadline = time.monotonic() + 120
        while newest(crashed) <= seen:
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.4))
        process.kill()
        process.join()
        assert process.exitcode == -9
        step = newest(crashed)
        assert step > seen
        seen = step
        path = mcore_ckpt.latest(crashed)
        assert path is not None
        assert not mcore_ckpt.verify(path).problems
    final = seen + 2
    for folder in (crashed, tmp_path / "straight"):
        process = start(toy_tree(folder, steps=final))
        process.join(180)
        assert process.exitcode == 0
    straight = mcore_ckpt.open(tmp_path / "straight")
    survived = mcore_ckpt.open(crashed)
    assert survived.step == straight.step == final
    for name in straight:
        assert survived[name].equal(straight[name]), name

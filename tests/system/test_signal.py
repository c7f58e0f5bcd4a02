"""SIGTERM to one rank: all finish the step, save, and end well."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mcore_ckpt

CONFIG = """
steps: 100000
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 4}
data: {mock: true, seq_length: 8}
schedule: {decay_steps: 50}
log: {progress: false, tensorboard: false, interval: 1}
"""


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    direct = [int(child) for child in path.read_text().split()]
    return direct + [below for child in direct for below in children(child)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc to find the ranks")
def test_sigterm_to_one_of_two_ranks(tmp_path: Path) -> None:
    """U22: the step in flight is finished and saved by both ranks; the exit status is 0."""
    (tmp_path / "toy.yaml").write_text(CONFIG)
    command = [
        *(str(Path(sys.executable).parent / "mcore-train"), "pretrain"),
        *("--config", str(tmp_path / "toy.yaml"), "--nproc", "2", "--batch.micro_size", "2"),
        *("--checkpoint.directory", str(tmp_path / "c"), "--log.directory", str(tmp_path)),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        ranks = [pid for pid in children(process.pid) if _is_rank(pid)]
        os.kill(ranks[-1], signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    checkpoint = mcore_ckpt.open(tmp_path / "c")
    assert f"to step {checkpoint.step}" in out
    assert checkpoint.state["data"]["consumed_samples"] == 4 * checkpoint.step


def _is_rank(pid: int) -> bool:
    """Whether a process listens for SIGTERM in Python and is no helper of multiprocessing."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(x for x in status.splitlines() if x.startswith("SigCgt")).split()[1], 16)
    return bool(caught & (1 << (signal.SIGTERM - 1)))

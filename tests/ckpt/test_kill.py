"""kill -9 in the middle of saves: the newest committed checkpoint always loads."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mcore_ckpt

# Imports torch once; for each number on its input a forked child saves from that step on.
SAVER = """
import os, sys
import torch
import mcore_ckpt
import mcore_ckpt.tensorstore_engine  # starts no thread yet, so that forking is safe
from mcore_parallel.layout import LayoutTensor, TensorLayout

torch.set_num_threads(1)
layout = {f"t{i}": TensorLayout.whole(f"model/t{i}", (40, 30)) for i in range(6)}

def save(step):
    tensors = {k: LayoutTensor(torch.full((40, 30), float(step)), v) for k, v in layout.items()}
    mcore_ckpt.save(sys.argv[1], step=step, tensors=tensors, state={"step": step},
                    keep_last=1, chunk_bytes=600)

for line in sys.stdin:
    child = os.fork()
    if not child:
        step = int(line)
        while True:
            save(step)
            os.write(1, f"saved {step}\\n".encode())
            step += 1
    os.write(1, f"child {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    """The synchronous half of U47: what loads is the last step reported saved, or the next."""
    chance = random.Random(5)
    last, unfinished = 0, 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        for _ in range(10):
            print(last + 1, file=saver.stdin, flush=True)
            lines = [saver.stdout.readline().split()]
            while lines[-1] != ["saved", str(last + 1)]:  # at least one save, then the kill
                lines.append(saver.stdout.readline().split())
            time.sleep(chance.random() * 0.2)
            child = next(int(value) for kind, value in lines if kind == "child")
            os.kill(child, signal.SIGKILL)
            while lines[-1] != ["dead"]:
                lines.append(saver.stdout.readline().split())
            last = max(int(line[1]) for line in lines if line[0] == "saved")
            newest = mcore_ckpt.latest(tmp_path)
            assert newest is not None
            opened = mcore_ckpt.open(newest)
            assert opened.step in (last, last + 1)
            assert opened.state == {"step": opened.step}
            assert len(opened) == 6
            assert all((tensor == opened.step).all() for tensor in opened.values())
            assert not mcore_ckpt.verify(newest).problems
            unfinished += any(path != newest for path in tmp_path.iterdir())
            last = opened.step
        saver.stdin.close()
    assert unfinished > 0, "no kill ever hit a save"

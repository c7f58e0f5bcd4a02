"""kill -9 of any rank in the middle of saves: the newest committed checkpoint always loads."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.local import find_local, load_local
from mcore_parallel.layout import LayoutTensor, TensorLayout

# Imports torch once; for each line on its input (the step to begin with, how to save, the number of
# ranks) it forks ranks that save step after step until one of them is killed; then the others are.
SAVER = """
import os, signal, sys
import torch
import torch.distributed as dist
import mcore_ckpt
import mcore_ckpt.tensorstore_engine  # starts no thread yet, so that forking is safe
from mcore_ckpt.local import save_local
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout

torch.set_num_threads(1)
folder, meeting = sys.argv[1:]

def tensors(group, step):
    found = {}
    for i in range(6):
        whole = TensorLayout.whole(f"model/t{i}", (40, 30))
        rows = 40 // group.size
        layout = whole.slice(0, group.rank * rows, (group.rank + 1) * rows)
        found[f"t{i}"] = LayoutTensor(torch.full(layout.shape, float(step)), layout)
    return found

def tell(group, step):
    if group.rank == 0:
        os.write(1, f"saved {step}\\n".encode())

def rank(number, size, step, how, rendezvous):
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number,
                                world_size=size)
    group = Group.world()
    saver = mcore_ckpt.AsyncSaver(group)
    while True:
        options = dict(step=step, tensors=tensors(group, step), state={"step": step},
                       chunk_bytes=600, keep_last=None if how == "prune" else 1)
        if how == "async":
            saver.save(folder, **options)
            for done in saver.wait():
                tell(group, done.step)
        elif how == "local":
            save_local(f"{folder}-local", step=step, tensors=tensors(group, step), group=group,
                       state={"step": step}, host=str(number))
            tell(group, step)
        else:
            mcore_ckpt.save(folder, group=group, **options)
            tell(group, step)
        if how == "prune" and number == 0:
            mcore_ckpt.prune(folder, keep_last=1)
        step += 1

for round, line in enumerate(sys.stdin):
    step, how, size = line.split()
    children = []
    for number in range(int(size)):
        child = os.fork()
        if not child:
            try:
                rank(number, int(size), int(step), how, f"{meeting}/{round}")
            except BaseException:
                if int(size) == 1:
                    raise
            os._exit(3)  # another rank is gone
        children.append(child)
    os.write(1, ("children " + " ".join(map(str, children)) + "\\n").encode())
    first, _ = os.wait()
    for child in children:
        if child != first:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""
KINDS = [(how, size) for size in (1, 2) for how in ("sync", "async", "prune", "local")]
ROUNDS = 40 if os.environ.get("NIGHTLY") else 2


@pytest.mark.slow
@pytest.mark.timeout(200 * ROUNDS + 100)
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """U47: what loads is the last step reported saved, or the next; with every way of saving."""
    chance = random.Random(5)
    last, unfinished = 0, 0
    run, meeting = tmp_path / "run", tmp_path / "meeting"
    meeting.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, str(run), str(meeting)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if ROUNDS > 2 else None,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as saver:
        assert saver.stdin is not None
        for how, size in KINDS * ROUNDS:
            print(last + 1, how, size, file=saver.stdin, flush=True)
            lines = [line_of(saver)]
            while not {"children", "saved"} <= {line[0] for line in lines}:
                lines.append(line_of(saver))  # at least one save, then the kill
            time.sleep(chance.random() * 0.2)
            children = next(line[1:] for line in lines if line[0] == "children")
            os.kill(int(chance.choice(children)), signal.SIGKILL)
            while lines[-1] != ["dead"]:
                lines.append(line_of(saver))
            last = max(int(line[1]) for line in lines if line[0] == "saved")
            if how == "local":
                last = check_local(tmp_path / "run-local", last)
                continue
            last, half = check(run, last)
            unfinished += half
        saver.stdin.close()
    assert unfinished > 0, "no kill ever hit a save"


def line_of(saver: "subprocess.Popen[str]") -> list[str]:
    assert saver.stdout is not None
    line = saver.stdout.readline().split()
    assert line, "the saver ended"
    return line


def check(run: Path, last: int) -> tuple[int, Any]:
    """Return the newest step, and whether something besides it was being written or removed."""
    newest = mcore_ckpt.latest(run)
    assert newest is not None
    opened = mcore_ckpt.open(newest)
    assert opened.step in (last, last + 1)
    assert opened.state == {"step": opened.step}
    assert len(opened) == 6
    assert all((tensor == opened.step).all() for tensor in opened.values())
    assert not mcore_ckpt.verify(newest).problems
    found = mcore_ckpt.find(run, scan="full")
    assert found is not None
    assert found.path == newest
    return opened.step, any(path != newest for path in run.iterdir())


def check_local(folder: Path, last: int) -> int:
    """Return the newest step of which every share is there, and load it."""
    found = find_local(folder)
    assert found is not None
    assert found.step in (last, last + 1)
    assert found.state == {"step": found.step}
    wholes = {f"t{i}": TensorLayout.whole(f"model/t{i}", (40, 30)) for i in range(6)}
    loaded = {key: LayoutTensor(torch.zeros(40, 30), layout) for key, layout in wholes.items()}
    load_local(found, loaded)
    assert all(bool((held.tensor == found.step).all()) for held in loaded.values())
    return found.step

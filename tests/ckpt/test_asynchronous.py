"""Saving in the background: what is saved, when it is there, and who hears of errors."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import plans
from mcore_ckpt.asynchronous import AsyncSaver
from mcore_ckpt.engine import ChunkData, Writing
from mcore_ckpt.snapshot import HostMemory
from mcore_ckpt.storage import LocalStorage, Storage
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_parallel.collectives import all_reduce
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.testing import RankPool

SHAPE = (12, 5)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]


class GatedEngine(TensorstoreEngine):
    """Writes nothing before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.reached = threading.Event()

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        self.reached.set()
        assert self.gate.wait(60)
        return super().write(storage, chunks)


class FullEngine(TensorstoreEngine):
    """A disk without space."""

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        raise OSError(28, "No space left on device", "/full")


def tensors(value: float, device: str = "cpu") -> dict[str, LayoutTensor]:
    return {
        "w": LayoutTensor(
            torch.full(SHAPE, float(value), device=device), TensorLayout.whole("model/w", SHAPE)
        ),
        "n": LayoutTensor(
            torch.tensor(int(value), device=device), TensorLayout.whole("model/n", ())
        ),
    }


def read(path: Path) -> float:
    opened = mcore_ckpt.open(path)
    assert bool((opened["model/w"] == opened["model/n"]).all())
    return float(opened["model/n"])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_is_what_was_there_at_the_request(tmp_path: Path, device: str) -> None:
    """Training changes tensors and state right after the request."""
    engine = GatedEngine()
    held, state = tensors(1.0, device), {"seen": [1]}
    with AsyncSaver() as saver:
        pending = saver.save(tmp_path, step=10, tensors=held, state=state, engine=engine)
        assert engine.reached.wait(60)
        held["w"].tensor.fill_(2.0)
        state["seen"].append(2)
        assert not pending.ended
        assert saver.poll() == []
        assert mcore_ckpt.latest(tmp_path) is None
        engine.gate.set()
        assert saver.wait() == [pending]
        assert saver.pending is None
        assert saver.poll() == []
    assert pending.wait() == mcore_ckpt.latest(tmp_path) == tmp_path / "step_00000010"
    assert read(tmp_path) == 1.0
    assert mcore_ckpt.read_state(tmp_path) == {"seen": [1]}


def test_the_step_of_a_save_is_that_of_its_request(tmp_path: Path) -> None:
    """U48: requested at step 10, completed while step 12 runs: it is step 10 all the same."""
    engine = GatedEngine()
    events: list[tuple[str, int, int]] = []
    with AsyncSaver() as saver:
        for step in range(10, 14):
            for done in saver.poll():
                events.append(("completed", done.step, step))
            if step == 10:
                pending = saver.save(tmp_path, step=10, tensors=tensors(10), engine=engine)
                events.append(("requested", pending.step, step))
            if step == 11:
                engine.gate.set()
                pending.wait()
    assert events == [("requested", 10, 10), ("completed", 10, 12)]
    assert mcore_ckpt.open(tmp_path).step == 10


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """Back-pressure: never two at a time, and the snapshot of the first is left alone."""
    engine = GatedEngine()
    requested = threading.Event()
    with AsyncSaver() as saver:
        saver.save(tmp_path, step=1, tensors=tensors(1), engine=engine)
        assert engine.reached.wait(60)

        def second() -> None:
            saver.save(tmp_path, step=2, tensors=tensors(2))
            requested.set()

        thread = threading.Thread(target=second)
        thread.start()
        assert not requested.wait(0.2)
        engine.gate.set()
        thread.join(60)
        assert requested.is_set()
        assert [done.step for done in saver.wait()] == [1, 2]
    assert [read(p) for p in mcore_ckpt.list_checkpoints(tmp_path)] == [1, 2]


def test_one_snapshot_of_memory_is_kept_and_used_again() -> None:
    memory = HostMemory()
    first = memory.take(tensors(1))
    at = first["w"].tensor.data_ptr()
    size = memory.num_bytes
    assert size == 12 * 5 * 4 + 8
    second = memory.take(tensors(2))
    assert second["w"].tensor.data_ptr() == at
    assert memory.num_bytes == size
    assert bool((second["w"].tensor == 2).all())
    with AsyncSaver() as saver:
        saver.prepare(tensors(1))
        assert saver._memory.num_bytes == size
        assert saver.wait() == []
    memory.take({"w": tensors(3)["w"]})
    assert memory.num_bytes == size - 8  # what is no longer saved is not kept
    transposed = LayoutTensor(torch.arange(60.0).view(5, 12).T, TensorLayout.whole("w", SHAPE))
    assert torch.equal(memory.take({"w": transposed})["w"].tensor, transposed.tensor)


def test_old_ones_go_when_the_new_one_is_durable(tmp_path: Path) -> None:
    """U47: step 10 with keep_last=1 is there until step 20 is, and gone then."""
    mcore_ckpt.save(tmp_path, step=10, tensors=tensors(10))
    engine = GatedEngine()
    with AsyncSaver() as saver:
        saver.save(tmp_path, step=20, tensors=tensors(20), keep_last=1, engine=engine)
        assert engine.reached.wait(60)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000010", "step_00000020"]
        assert read(tmp_path) == 10
        engine.gate.set()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000020"]
    assert read(tmp_path) == 20


@pytest.mark.parametrize("by", ["save", "poll", "wait", "close", "block"])
def test_an_error_is_raised_at_the_next_call_and_once(tmp_path: Path, by: str) -> None:
    """A full disk: the message has the step and says what to do; the older one is intact."""
    mcore_ckpt.save(tmp_path, step=1, tensors=tensors(1))
    saver = AsyncSaver()
    saver.save(tmp_path, step=2, tensors=tensors(2), engine=FullEngine())
    while saver.pending and not saver.pending.ended:
        pass
    calls: dict[str, Any] = {
        "save": lambda: saver.save(tmp_path, step=3, tensors=tensors(3)),
        "poll": saver.poll,
        "wait": saver.wait,
        "close": saver.close,
        "block": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(
        mcore_ckpt.CheckpointError,
        match=r"saving step 2 .* nothing was committed: .*No space left .*free space there",
    ):
        calls[by]()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert saver.wait() == []
    saver.save(tmp_path, step=4, tensors=tensors(4))
    saver.close()
    assert read(tmp_path) == 4


def test_mistakes_come_to_light_in_the_background(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save(tmp_path, step=1, tensors={}, state={"bad": {1, 2}})
    with pytest.raises(ValueError, match="is a set"):
        saver.wait()
    saver.save(tmp_path, step=1, tensors={}, keep_every=0)
    with pytest.raises(ValueError, match="keep_every is 0; nearest valid: 1"):
        saver.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_block_that_is_left_at_once_abandons(tmp_path: Path, kind: type[BaseException]) -> None:
    mcore_ckpt.save(tmp_path, step=1, tensors=tensors(1))
    engine = GatedEngine()

    def leave() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path, step=2, tensors=tensors(2), engine=engine)
            assert engine.reached.wait(60)
            threading.Timer(0.2, engine.gate.set).start()
            raise kind

    with pytest.raises(kind):
        leave()
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_after_another_error_the_save_is_finished(tmp_path: Path) -> None:
    engine = GatedEngine()

    def leave() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path, step=2, tensors=tensors(2), engine=engine)
            threading.Timer(0.2, engine.gate.set).start()
            raise ArithmeticError("diverged")

    with pytest.raises(ArithmeticError, match="diverged"):
        leave()
    assert read(tmp_path) == 2

    def leave_twice() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path, step=3, tensors=tensors(3), engine=FullEngine())
            raise ArithmeticError("diverged")

    with pytest.raises(ArithmeticError, match="diverged") as caught:
        leave_twice()
    assert "saving step 3" in caught.value.__notes__[0]


# Imports torch once. For each way to end, a forked child saves in the background and ends that way.
ENDS = """
import os, signal, sys, threading, time
import torch
import mcore_ckpt
from mcore_ckpt import plans
from mcore_ckpt.tensorstore_engine import TensorstoreEngine
from mcore_parallel.layout import LayoutTensor, TensorLayout

class Slow(TensorstoreEngine):
    def write(self, storage, chunks):
        os.write(writing, b"w")
        reached.set()
        time.sleep(60 if how == "killed" else 0.3)
        return super().write(storage, chunks)

for how in ("close", "forget", "killed"):
    told, writing = os.pipe()
    child = os.fork()
    if not child:
        break
    os.read(told, 1)
    if how == "killed":
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(how, os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit(0)

reached = threading.Event()
w = LayoutTensor(torch.zeros(4), TensorLayout.whole("model/w", (4,)))
saver = mcore_ckpt.AsyncSaver()
saver.save(f"{sys.argv[1]}/{how}", step=20, tensors={"w": w}, engine=Slow(), keep_last=1)
reached.wait()
if how == "close":
    saver.close()
"""


@pytest.mark.slow
def test_leaving_python(tmp_path: Path) -> None:
    """With `close` the exit waits; without it, or killed, there is what was there before (U47)."""
    for how in ("close", "forget", "killed"):
        mcore_ckpt.save(tmp_path / how, step=10, tensors=tensors(10))
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == ["close", "0", "forget", "0", "killed", "-9"]
    assert not done.stderr
    left = {"close": [20], "forget": [10], "killed": [10, 20]}
    for how, steps in left.items():
        names = sorted(path.name for path in (tmp_path / how).iterdir())
        assert names == [f"step_{step:08d}" for step in steps]
        assert mcore_ckpt.open(tmp_path / how).step == steps[0]
        mcore_ckpt.save(tmp_path / how, step=30, tensors=tensors(30), keep_last=1)
        assert [path.name for path in (tmp_path / how).iterdir()] == ["step_00000030"]


# --- several ranks --------------------------------------------------------------------------------


class DelayedEngine(TensorstoreEngine):
    """Ranks are not equally fast; some of them fail."""

    def __init__(self, delay: float, *, fails: bool) -> None:
        super().__init__()
        self.delay, self.fails = delay, fails

    def write(self, storage: Storage, chunks: Iterable[ChunkData]) -> Writing:
        threading.Event().wait(self.delay)
        if self.fails:
            raise OSError(28, "No space left on device", "/full")
        return super().write(storage, chunks)


def shard(group: Group, value: float) -> dict[str, LayoutTensor]:
    whole = TensorLayout.whole("model/w", (8, 3))
    rows = 8 // group.size
    layout = whole.slice(0, group.rank * rows, (group.rank + 1) * rows)
    return {"w": LayoutTensor(torch.full(layout.shape, float(value)), layout)}


def train(folder: Path, failing: int) -> list[tuple[str, int]]:
    """Six steps with a collective each; steps 2 and 4 are saved, one of them badly."""
    group = Group.world()
    events: list[tuple[str, int]] = []
    with AsyncSaver(group) as saver:
        for step in range(1, 7):
            total = all_reduce(torch.ones(1000), group)  # training, at the same time
            assert bool((total == group.size).all())
            try:
                for done in saver.poll():
                    events.append(("completed", done.step))
            except mcore_ckpt.CheckpointError as error:
                events.append((str(error), step))
            if step % 2 == 0 and step < 6:
                fails = step == failing and group.rank == 1
                engine = DelayedEngine(0.05 * group.rank, fails=fails)
                try:
                    saver.save(folder, step=step, tensors=shard(group, step), engine=engine)
                except mcore_ckpt.CheckpointError as error:
                    events.append((str(error), step))
                    saver.save(folder, step=step, tensors=shard(group, step), engine=engine)
                events.append(("requested", step))
        try:
            for done in saver.wait():
                events.append(("completed", done.step))
        except mcore_ckpt.CheckpointError as error:
            events.append((str(error), 7))
    return events


def test_ranks_save_beside_collectives_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks see a save end at the same moment of their programs."""
    first, second = ranks.run(train, 2, tmp_path, 0)
    assert first == second
    assert [e for e in first if e[0] == "requested"] == [("requested", 2), ("requested", 4)]
    assert [e for e in first if e[0] == "completed"] == [("completed", 2), ("completed", 4)]
    assert [mcore_ckpt.open(p).step for p in mcore_ckpt.list_checkpoints(tmp_path)] == [2, 4]
    assert bool((mcore_ckpt.open(tmp_path)["model/w"] == 4).all())


def test_an_error_on_one_rank_reaches_all(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(train, 2, tmp_path, 2)
    assert first == second
    messages = [what for what, _ in first if what.startswith("saving step 2")]
    assert len(messages) == 1
    assert "rank 1 of 2" in messages[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def lose_a_rank(folder: Path) -> str:
    group = Group.world()
    saver = AsyncSaver(group)
    if group.rank == 0:
        saver.save(folder, step=1, tensors=shard(group, 1.0))
        try:
            saver.wait()
        except RuntimeError as error:
            return str(error)
    saver._own.close()  # its connections end as those of a rank that died
    return ""


def test_the_loss_of_a_rank_ends_the_save(ranks: RankPool, tmp_path: Path) -> None:
    """The ranks that are left are not left waiting, and nothing is committed."""
    found = ranks.run(lose_a_rank, 2, tmp_path, timeout=60)
    assert "rank 1" in found[0]
    assert mcore_ckpt.latest(tmp_path) is None


def test_abandoned_by_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(abandon_on_one, 2, tmp_path) == [[], []]


def abandon_on_one(folder: Path) -> list[str]:
    group = Group.world()
    saver = AsyncSaver(group)
    engine = GatedEngine()
    saver.save(folder, step=1, tensors=shard(group, 1.0), engine=engine)
    assert engine.reached.wait(60)
    threading.Timer(0.2, engine.gate.set).start()
    if group.rank == 1:
        saver.close(abandon=True)
    else:
        with pytest.raises(mcore_ckpt.CheckpointError, match="rank 1 of 2: it was abandoned"):
            saver.close()
    all_reduce(torch.ones(1), group)
    return sorted(LocalStorage(folder).entries(""))


def peak_memory() -> int:
    """The most bytes that this process held since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_of_a_save(folder: Path) -> tuple[int, int]:
    """Return the bytes of this rank's state, and those that a save took besides at its peak."""
    group = Group.world()
    layout = TensorLayout.whole("model/w", (16, 1 << 20)).slice(
        0, group.rank * 8, group.rank * 8 + 8
    )
    held = {"w": LayoutTensor(torch.ones(layout.shape), layout)}
    # Flat shards with another cut, so that half of it changes hands.
    flat = TensorLayout.whole("model/m", (1 << 23,))
    odd = flat.flat_range(*((0, 1 << 22) if group.rank else (1 << 22, 1 << 23)))
    held["m"] = LayoutTensor(torch.ones(odd.shape), odd)
    size = sum(value.tensor.nbytes for value in held.values())
    with AsyncSaver(group) as saver:
        small = shard(group, 0)
        saver.save(folder, step=1, tensors=small)  # what libraries need once
        saver.wait()
        forget_peak()
        before = peak_memory()
        saver.save(folder, step=2, tensors=held, exchange_bytes=4 << 20, chunk_bytes=1 << 20)
        saver.wait()
        return size, peak_memory() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
def test_the_memory_of_a_save(ranks: RankPool, tmp_path: Path) -> None:
    """One snapshot, and bounded staging: two portions, what the exchange packs, and some slack."""
    for size, taken in ranks.run(memory_of_a_save, 2, tmp_path):
        assert size == 48 << 20
        assert size <= taken < size + (44 << 20)  # a second one would be 48


def count_plans(folder: Path) -> list[int]:
    """Save four times, the third time with a tensor more on one rank; return the plans made."""
    group = Group.world()
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch, AsyncSaver(group) as saver:
        original = plans.plan_save

        def counting(*args: Any, **options: Any) -> Any:
            made.append(1)
            return original(*args, **options)

        patch.setattr(plans, "plan_save", counting)
        counts = []
        for step in range(1, 5):
            held = shard(group, step)
            if step > 2 and group.rank == 1:
                layout = TensorLayout.whole("model/more", (2,))
                held["more"] = LayoutTensor(torch.full((2,), float(step)), layout)
            path = saver.save(folder, step=step, tensors=held, chunk_bytes=16).wait()
            counts.append(len(made))
            opened = mcore_ckpt.open(path)
            assert list(opened) == ["model/more", "model/w"][step < 3 :]
            assert all(bool((tensor == step).all()) for tensor in opened.values())
            all_reduce(torch.ones(1), group)  # nobody goes on before all have looked
    return counts


def test_the_plan_is_made_once_for_each_layout(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(count_plans, 2, tmp_path) == [[1, 1, 2, 2]] * 2

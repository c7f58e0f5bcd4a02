"""Crashes at every moment of a save, on a disk that keeps only what was synced.

A recording storage logs a sequence of saves: over an older checkpoint, over the same step, with
retention, in the background, and a prune after them. Every prefix of the log is replayed with
unsynced data dropped, kept, torn or mixed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.commit import Status, StepDirectory, read_manifest, scan
from mcore_ckpt.testing import (
    Operation,
    RecordingStorage,
    Survival,
    Tree,
    TreeStorage,
    crashes,
    write_tree,
)
from mcore_ckpt.verifying import verify_at
from mcore_parallel.layout import LayoutTensor, TensorLayout

SURVIVALS: list[Survival] = ["drop", "keep", "torn", *range(6)]
SAVES = [  # (step, keep_last, in the background) in the order in which the run saves them
    (10, None, False),
    (20, 1, False),
    (20, 1, True),  # the same step again, after a run was taken back
    (30, 2, True),
]


def tensors(seed: int) -> dict[str, LayoutTensor]:
    values = {
        "model/w": torch.full((4, 6), float(seed)),
        "model/scalar": torch.tensor(seed, dtype=torch.int64),
        "exp_avg/w": torch.full((4, 6), float(-seed), dtype=torch.bfloat16),
    }
    return {
        name: LayoutTensor(value, TensorLayout.whole(name, tuple(value.shape)))
        for name, value in values.items()
    }


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The log of all saves; `ends[i]` operations were done when save i returned."""

    log: list[Operation]
    ends: list[int]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    storage = RecordingStorage(tmp_path_factory.mktemp("recorded"))
    ends = []
    saver = mcore_ckpt.AsyncSaver()
    for number, (step, keep_last, background) in enumerate(SAVES):
        options: dict[str, Any] = {
            "step": step,
            "tensors": tensors(number),
            "state": {"save": number},
            "files": {"tokenizer/vocab.txt": b"a b c"},
            "keep_last": keep_last,
            "chunk_bytes": 48,
            "storage": storage,
        }
        if background:
            saver.save(storage.root, **options)
            saver.wait()
        else:
            mcore_ckpt.save(storage.root, **options)
        ends.append(len(storage.log))
    assert len(mcore_ckpt.prune(storage.root, keep_last=1, storage=storage).removed) == 1
    return Recorded(log=storage.log, ends=ends)


def all_crashes(recorded: Recorded) -> Iterator[tuple[int, Survival, Tree]]:
    return crashes(recorded.log, SURVIVALS)


def faults(recorded: Recorded, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Yield what no crash may leave; `seen` collects (last save returned, save found)."""
    for done, survival, tree in all_crashes(recorded):
        storage = TreeStorage(tree)
        where = f"crash after {done} operations, survival {survival!r}"
        committed: list[StepDirectory] = []
        broken: list[str] = []
        for found in scan(storage):
            if found.status is Status.COMMITTED:
                committed.append(found)
                broken += (str(problem) for problem in verify_at(storage, found.name).problems)
            elif found.status is not Status.UNCOMMITTED:
                broken.append(f"{found.name}: {found.status.value}")
        if broken:
            yield f"{broken[0]}: {where}"
            continue
        durable = sum(end <= done for end in recorded.ends) - 1
        if not committed:
            if durable >= 0:
                yield f"nothing committed: {where}"
            continue
        number = int(read_manifest(storage, committed[-1].name).state["save"])
        # Either the last save that returned, or the one under way if its marker got through.
        if number not in (durable, durable + 1) or committed[-1].step != SAVES[number][0]:
            yield f"save {number} after save {durable} had returned: {where}"
        if seen is not None:
            seen.add((durable, number))


def test_whatever_is_committed_is_whole_and_the_newest_is_there(recorded: Recorded) -> None:
    """U47, for every prefix of the writes of four saves with retention, and of a prune."""
    seen: set[tuple[int, int]] = set()
    assert not list(faults(recorded, seen))
    assert {(n, n) for n in range(4)} <= seen
    assert {(n - 1, n) for n in range(4)} <= seen, "no crash hit the moment after a rename"


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("no sync", "nothing committed"),
        ("chunks not synced", "bytes instead of"),
        ("old one removed first", "nothing committed"),
    ],
)
def test_the_replay_notices_a_wrong_protocol(recorded: Recorded, broken: str, fault: str) -> None:
    """The control: without the syncs, or in another order, there are faults."""
    log = list(recorded.log)
    if broken == "no sync":
        log = [o for o in log if o.kind != "sync"]
    elif broken == "chunks not synced":
        first = [o for o in log[: recorded.ends[0]] if not (o.kind == "sync" and "/c." in o.path)]
        log = first + log[recorded.ends[0] :]
    else:
        removal = next(
            i for i, o in enumerate(log) if o.kind == "rename" and o.path.endswith("/COMMIT")
        )
        log.insert(recorded.ends[0], log.pop(removal))
    found = list(faults(Recorded(log=log[: recorded.ends[1]], ends=recorded.ends)))
    assert any(fault in f for f in found)


def test_after_a_crash_the_checkpoint_loads_and_the_next_save_cleans_up(
    recorded: Recorded, tmp_path: Path
) -> None:
    """On a real disk, for a spread of crashes: load, save on, and find nothing left over."""
    states = [(done, survival, tree) for done, survival, tree in all_crashes(recorded)]
    for i, (done, survival, tree) in enumerate(states[:: len(states) // 24]):
        root = tmp_path / str(i)
        write_tree(tree, root)
        path = mcore_ckpt.latest(root)
        if path:
            number = int(mcore_ckpt.read_state(path)["save"])
            assert number >= sum(end <= done for end in recorded.ends) - 1
            loaded = tensors(99)
            mcore_ckpt.load(root, loaded)
            for key, expected in tensors(number).items():
                assert torch.equal(loaded[key].tensor, expected.tensor), (done, survival)
        again = mcore_ckpt.save(root, step=40, tensors=tensors(4), keep_last=1)
        assert [p.name for p in root.iterdir()] == [again.name] == ["step_00000040"]
        assert not mcore_ckpt.verify(root).problems

"""Which checkpoints exist: newest, retention, leftovers, saves over the same step."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.commit import remove_checkpoint, retain, step_name
from mcore_ckpt.storage import LocalStorage
from mcore_parallel.layout import LayoutTensor, TensorLayout


def save(directory: Path, step: int, value: float = 0.0, keep_last: int | None = None) -> Path:
    tensors = {"w": LayoutTensor(torch.full((3,), value), TensorLayout.whole("model/w", (3,)))}
    return mcore_ckpt.save(directory, step=step, tensors=tensors, keep_last=keep_last)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_names() -> None:
    assert step_name(1000) == "step_00001000"
    assert step_name(123456789, 2) == "step_123456789.2"


def test_latest_and_list(tmp_path: Path) -> None:
    assert mcore_ckpt.latest(tmp_path / "not there") is None
    assert mcore_ckpt.list_checkpoints(tmp_path) == []
    for step in (20, 3, 100_000_000):
        save(tmp_path / "run", step)
    expected = [tmp_path / "run" / n for n in ("step_00000003", "step_00000020", "step_100000000")]
    assert mcore_ckpt.list_checkpoints(tmp_path / "run") == expected
    assert mcore_ckpt.latest(tmp_path / "run") == expected[-1]


def test_the_parent_directories_are_made(tmp_path: Path) -> None:
    assert save(tmp_path / "a" / "b" / "c", 1).is_dir()


def test_retention_spares_newer_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        save(tmp_path, step)
    save(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == [step_name(s) for s in (3, 4, 9)]
    save(tmp_path, 10, keep_last=1)
    assert names(tmp_path) == [step_name(10)]


def test_saving_a_step_again_replaces_it_once_the_new_one_stands(tmp_path: Path) -> None:
    save(tmp_path, 5, value=1.0)
    path = save(tmp_path, 5, value=2.0, keep_last=3)
    assert path.name == "step_00000005.1"
    assert mcore_ckpt.latest(tmp_path) == path
    assert names(tmp_path) == [path.name]
    assert mcore_ckpt.open(tmp_path)["model/w"][0] == 2.0
    assert save(tmp_path, 5, value=3.0).name == "step_00000005.2"  # no retention: both are there
    assert names(tmp_path) == ["step_00000005.1", "step_00000005.2"]
    assert mcore_ckpt.list_checkpoints(tmp_path) == [tmp_path / "step_00000005.2"]


def test_leftovers_are_ignored_and_swept_by_the_next_save(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    crashed = save(tmp_path, 20)
    (crashed / "COMMIT").rename(crashed / "UNCOMMITTED")
    (crashed / "model" / "w" / "c.0.__lock").write_bytes(b"")
    (tmp_path / "step_00000030").mkdir()  # a crash right at the beginning
    half_removed = tmp_path / "step_00000005.removed" / "model" / "w"
    half_removed.mkdir(parents=True)
    (half_removed / "c.0").write_bytes(b"0")
    lock = good / "model" / "w" / "c.0.__lock"
    lock.write_bytes(b"")
    assert mcore_ckpt.latest(tmp_path) == good
    assert mcore_ckpt.open(tmp_path).path == good
    assert not mcore_ckpt.verify(tmp_path).problems
    save(tmp_path, 20)
    assert names(tmp_path) == [step_name(10), step_name(20)]
    assert not lock.exists()
    assert not list((tmp_path / step_name(20)).rglob("*.__lock"))


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step_1").mkdir()
    foreign = tmp_path / "step_00000007"
    foreign.mkdir()
    (foreign / "data.bin").write_bytes(b"other program")
    save(tmp_path, 8, keep_last=1)
    with pytest.raises(ValueError, match="step_00000007 is in the way and not a checkpoint"):
        save(tmp_path, 7)
    assert names(tmp_path) == ["notes.txt", "step_00000007", "step_00000008", "step_1"]
    assert (foreign / "data.bin").read_bytes() == b"other program"


@pytest.mark.parametrize("what", ["link", "file", "link to nothing"])
def test_what_is_no_directory_is_never_written_through(tmp_path: Path, what: str) -> None:
    """A link in the place of a checkpoint: what it leads to is another run's, and stays whole."""
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, 1)
    elsewhere = save(other, 2)
    there = run / "step_00000002"
    if what == "file":
        there.write_text("mine")
    else:
        there.symlink_to(elsewhere if what == "link" else tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"step_00000002 is in the way and no directory"):
        save(run, 2, value=7.0)
    assert mcore_ckpt.open(elsewhere)["model/w"].tolist() == [0.0, 0.0, 0.0]
    assert mcore_ckpt.latest(run) == run / "step_00000001"
    there.unlink()
    save(run, 2)


def test_a_damaged_marker_is_passed_over_with_a_warning_and_never_swept(tmp_path: Path) -> None:
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    (new / "COMMIT").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="step_00000002/COMMIT is damaged"):
        assert mcore_ckpt.latest(tmp_path) == old
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
    assert save(tmp_path, 2).name == "step_00000002.1"


def test_a_checkpoint_takes_no_checkpoints(tmp_path: Path) -> None:
    """Saved inside another one, nobody would find it: loading there goes by the outer one."""
    inside = save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"step_00000001 is itself a checkpoint .it has COMMIT."):
        save(inside, 2)
    (tmp_path / "step_00000005").mkdir()
    (tmp_path / "step_00000005" / "UNCOMMITTED").touch()
    with pytest.raises(ValueError, match="save to the directory above it"):
        save(tmp_path / "step_00000005", 2)
    assert mcore_ckpt.list_checkpoints(tmp_path) == [inside]
    assert not mcore_ckpt.verify(tmp_path).problems


class Interrupted(LocalStorage):
    """Another save of the same directory runs when this one has written its chunks."""

    step = 0

    def sync(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        if self.step and any("/c" in path for path in paths):
            step, self.step = self.step, 0
            save(self.root, step, value=2.0)
        super().sync(paths)


@pytest.mark.parametrize("other", [4, 5])
def test_two_saves_at_a_time(tmp_path: Path, other: int) -> None:
    """The first, which the other one swept, fails, says why, and takes nothing of the other's."""
    storage = Interrupted(tmp_path)
    storage.step = other
    tensors = {"w": LayoutTensor(torch.ones(3), TensorLayout.whole("model/w", (3,)))}
    with pytest.raises(mcore_ckpt.CheckpointError, match="only one may run there at a time"):
        mcore_ckpt.save(tmp_path, step=4, tensors=tensors, storage=storage)
    assert names(tmp_path) == [step_name(other)]
    assert not mcore_ckpt.verify(tmp_path).problems
    assert mcore_ckpt.open(tmp_path)["model/w"].tolist() == [2.0, 2.0, 2.0]


def test_opening_what_was_never_committed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "COMMIT").rename(path / "UNCOMMITTED")
    with pytest.raises(FileNotFoundError, match="was never committed"):
        mcore_ckpt.open(path)
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        mcore_ckpt.open(tmp_path)


class CannotRemove(LocalStorage):
    """A disk from which some files cannot be removed."""

    def remove(self, path: str) -> None:
        if path.endswith("c.0"):
            raise PermissionError(13, "busy", path)
        super().remove(path)


def test_what_cannot_be_removed_does_not_fail_the_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tensors = {"w": LayoutTensor(torch.zeros(3), TensorLayout.whole("model/w", (3,)))}
    storage = CannotRemove(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot remove old checkpoints"):
        mcore_ckpt.save(tmp_path, step=2, tensors=tensors, keep_last=1, storage=storage)
    assert [p.name for p in mcore_ckpt.list_checkpoints(tmp_path)] == ["step_00000002"]
    with pytest.warns(RuntimeWarning, match="cannot sweep"):
        mcore_ckpt.save(tmp_path, step=3, tensors=tensors, storage=storage)
    assert mcore_ckpt.latest(tmp_path) == tmp_path / "step_00000003"


def test_keep_last_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0; nearest valid: 1"):
        save(tmp_path, 1, keep_last=0)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_every": 4}, [4, 8, 10]),
        ({"keep_every": 4, "keep_last": 3}, [4, 8, 9, 10]),
        ({"keep_every": 5, "keep_last": 1}, [5, 10]),
        ({"keep_last": 20, "keep_every": 20}, list(range(1, 11))),
    ],
)
def test_keep_every(tmp_path: Path, options: dict[str, int], kept: list[int]) -> None:
    """The same steps, whether saving removes the others one by one or prune does so at the end."""
    tensors = {"w": LayoutTensor(torch.zeros(3), TensorLayout.whole("model/w", (3,)))}
    for step in range(1, 11):
        mcore_ckpt.save(tmp_path / "all", step=step, tensors=tensors)
        mcore_ckpt.save(tmp_path / "few", step=step, tensors=tensors, **options)
    expected = [step_name(step) for step in kept]
    assert names(tmp_path / "few") == expected
    (tmp_path / "all" / "step_00000099").mkdir()  # another process may be writing this one
    told = mcore_ckpt.prune(tmp_path / "all", dry_run=True, **options)
    assert len(names(tmp_path / "all")) == 11
    assert mcore_ckpt.prune(tmp_path / "all", **options) == told
    assert names(tmp_path / "all") == [*expected, "step_00000099"]
    gone = [path.name for path in told.removed]
    assert gone == [step_name(step) for step in range(1, 11) if step not in kept]
    assert mcore_ckpt.prune(tmp_path / "all", **options).removed == ()


def test_prune_goes_by_a_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_00000003" / "model" / "w" / "c.0").write_bytes(b"short")
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"00003 is damaged, so .*c\.0"):
        mcore_ckpt.prune(tmp_path, keep_last=1)
    assert len(names(tmp_path)) == 3
    assert len(mcore_ckpt.prune(tmp_path, keep_last=1, scan="none").removed) == 2
    with pytest.raises(ValueError, match="say what to keep"):
        mcore_ckpt.prune(tmp_path)
    with pytest.raises(ValueError, match="keep_every is 0; nearest valid: 1"):
        mcore_ckpt.prune(tmp_path, keep_every=0)
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        mcore_ckpt.prune(tmp_path / "nowhere", keep_last=1)


class Racing(LocalStorage):
    """A storage in which somebody else removes the same checkpoints, a moment earlier."""

    def rename(self, old: str, new: str) -> None:
        if old.endswith("COMMIT"):
            super().rename(old, new)
        super().rename(old, new)


def test_prune_beside_a_run_that_prunes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    mcore_ckpt.prune(tmp_path, keep_last=1, storage=Racing(tmp_path))
    assert mcore_ckpt.latest(tmp_path) == tmp_path / "step_00000003"
    save(tmp_path, 4, keep_last=1)
    assert names(tmp_path) == ["step_00000004"]


def test_retention_beside_a_faster_prune(tmp_path: Path) -> None:
    """What another process is removing is its business; the rest goes all the same."""
    for step in (1, 2, 3):
        save(tmp_path, step)

    class Raced(LocalStorage):
        def rename(self, old: str, new: str) -> None:
            if old == "step_00000001/COMMIT":
                remove_checkpoint(LocalStorage(tmp_path), "step_00000001")
            super().rename(old, new)

    assert retain(Raced(tmp_path), "step_00000003", 1) == ["step_00000002"]
    assert names(tmp_path) == ["step_00000003"]

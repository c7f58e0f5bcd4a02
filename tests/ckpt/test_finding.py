"""Finding a checkpoint: rank 0 looks, and all ranks get the same answer or the same error."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_parallel.group import Group
from mcore_parallel.testing import RankPool


def save(directory: Path, step: int) -> Path:
    return mcore_ckpt.save(directory, step=step, tensors={}, state={"consumed": 4 * step})


def damage_marker(path: Path) -> None:
    (path / "COMMIT").write_text("{}")


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{}")


def test_the_newest_of_a_directory_or_the_checkpoint_itself(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    newest = mcore_ckpt.Found(path=second, step=2, state={"consumed": 8})
    assert mcore_ckpt.find(tmp_path) == newest
    assert mcore_ckpt.find(str(second)) == newest
    assert mcore_ckpt.find(first) == mcore_ckpt.Found(path=first, step=1, state={"consumed": 4})


def test_the_answer_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    found = mcore_ckpt.find("run")
    assert found is not None
    assert found.path == path


def test_where_nothing_is_committed(tmp_path: Path) -> None:
    assert mcore_ckpt.find(tmp_path) is None
    assert mcore_ckpt.find(tmp_path / "not" / "there") is None
    unfinished = tmp_path / "step_00000001"
    unfinished.mkdir()
    (unfinished / "UNCOMMITTED").write_text("")
    assert mcore_ckpt.find(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="step_00000001 was never committed"):
        mcore_ckpt.find(unfinished)


def test_a_damaged_marker_is_passed_over_below_a_directory(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    damage_marker(second)
    with pytest.warns(RuntimeWarning, match="COMMIT is damaged"):
        found = mcore_ckpt.find(tmp_path)
    assert found is not None
    assert found.path == first
    with pytest.raises(mcore_ckpt.CheckpointError, match=r"finding .* failed: .*COMMIT is damaged"):
        mcore_ckpt.find(second)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights\.bin is a file; a checkpoint is a directory"):
        mcore_ckpt.find(tmp_path / "weights.bin")


def outcome(call: Callable[[], Any]) -> str:
    try:
        found = call()
    except (ValueError, FileNotFoundError, mcore_ckpt.CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "None" if found is None else json.dumps([str(found.path), found.step, found.state])


def find_in_own(views: list[list[Path]]) -> list[str]:
    """Find in directories of which each rank sees its own."""
    group = Group.world()
    return [outcome(partial(mcore_ckpt.find, view[group.rank], group)) for view in views]


def test_ranks_with_different_views_agree(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0's view counts, whatever the other sees: a later step, nothing, or damage."""
    ones = [tmp_path / f"{name}" for name in ("good", "later", "empty", "damaged", "file")]
    good, later, empty, damaged, file = ones
    path = save(good, 1)
    save(later, 2)
    empty.mkdir()
    damage_manifest(save(damaged, 3))
    file.write_text("")
    unfinished = tmp_path / "step_00000009"
    unfinished.mkdir()
    (unfinished / "UNCOMMITTED").write_text("")
    views = [
        *([good, other] for other in (good, later, empty, damaged, file)),
        *([first, good] for first in (empty, damaged, file, unfinished)),
    ]
    by_rank = ranks.run(find_in_own, 2, views)
    for outcomes in by_rank:
        for found in outcomes[:5]:
            assert json.loads(found) == [str(path), 1, {"consumed": 4}]
        assert outcomes[5] == "None"
        for found, kind, part in zip(
            outcomes[6:],
            ("CheckpointError", "ValueError", "FileNotFoundError"),
            ("manifest.json", "is a file", "was never committed"),
            strict=True,
        ):
            assert found.startswith(kind), found
            assert part in found, found
    assert all("rank 0 of 2" in found for found in by_rank[1][6:])

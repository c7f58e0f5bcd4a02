"""Finding a checkpoint: rank 0 looks, and all ranks get the same answer or the same error."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout
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


def test_damage_is_found_by_a_scan_and_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    """A chunk cut short, a chunk with a flipped bit, a manifest: each by the scan that sees it."""
    layout = TensorLayout.whole("model/w", (3,))
    tensors = {"w": LayoutTensor(torch.ones(3), layout)}
    paths = [mcore_ckpt.save(tmp_path, step=step, tensors=tensors) for step in range(1, 6)]
    damage_manifest(paths[4])
    chunk = paths[3] / "model" / "w" / "c.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    chunk = paths[2] / "model" / "w" / "c.0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    (paths[1] / "model" / "zarr.json").unlink()
    found = ranks.run(scan_levels, 2, tmp_path, paths[3])
    assert found[0] == found[1]
    assert [step for step, _ in found[0][:2]] == [3, 1]  # quick, full
    none, itself, unknown = (text for _, text in found[0][2:])
    assert "manifest.json" in none
    assert "c.0 has" in itself
    assert "scan is 'deep'; it is 'none', 'quick' or 'full'" in unknown
    damage_manifest(paths[0])
    with (
        pytest.warns(RuntimeWarning, match="passing over|passed over"),
        pytest.raises(mcore_ckpt.CheckpointError, match="every checkpoint there is damaged"),
    ):
        mcore_ckpt.find(tmp_path, scan="full")


def scan_levels(folder: Path, one: Path) -> list[tuple[int, str]]:
    group = Group.world()
    results: list[tuple[int, str]] = []
    asked: list[tuple[Path, Any]] = [(folder, "quick"), (folder, "full"), (folder, "none")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for path, scan in [*asked, (one, "quick"), (folder, "deep")]:
            try:
                found = mcore_ckpt.find(path, group, scan=scan)
                assert found is not None
                results.append((found.step, ""))
            except (mcore_ckpt.CheckpointError, ValueError) as error:
                results.append((-1, str(error)))
    return results

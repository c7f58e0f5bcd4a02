"""The command that removes old checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_ckpt import pruning
from mcore_ckpt.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in range(1, 7):
        mcore_ckpt.save(tmp_path, step=step, tensors={})
    return tmp_path


def steps(run: Path) -> list[int]:
    return [mcore_ckpt.open(path).step for path in mcore_ckpt.list_checkpoints(run)]


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prune", str(run), "--keep-last", "2", "--keep-every", "2"]
    assert main([*command, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert main(command) == 0
    done = capsys.readouterr().out
    assert told.replace("would remove", "removed") == done
    assert done.splitlines() == [
        f"removed {run}/step_00000001",
        f"removed {run}/step_00000003",
        f"{run}/step_00000006: kept as the newest; removed 2 checkpoints",
    ]
    assert steps(run) == [2, 4, 5, 6]


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep-every", "5", "--json", "--scan", "full"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["newest"] == f"{run}/step_00000006"
    assert row["removed"] == [f"{run}/step_0000000{step}" for step in (1, 2, 3, 4)]
    assert steps(run) == [5, 6]


@pytest.mark.parametrize("damaged", [False, True])
def test_the_newest_goes_while_it_is_looked_at(
    run: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """A run saves the next step meanwhile and keeps that alone: so it is looked at in its turn."""
    looked: list[str] = []
    scan_part = pruning.scan_part

    def slow(storage: Any, name: str, *arguments: Any) -> Any:
        looked.append(name)
        found = [] if damaged else scan_part(storage, name, *arguments)
        if len(looked) == 1:
            mcore_ckpt.save(run, step=7, tensors={}, keep_last=1)
            found = scan_part(storage, name, *arguments) if damaged else found
        return found

    monkeypatch.setattr(pruning, "scan_part", slow)
    done = pruning.prune(run, keep_last=1)
    assert done.newest.name == "step_00000007"
    assert looked == ["step_00000006", "step_00000007"]
    assert steps(run) == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "say what to keep"), (["--keep-last", "0"], "keep_last is 0; nearest valid: 1")],
)
def test_mistakes(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["prune", str(run), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mcore-ckpt: ")
    assert message in error
    assert error.count("\n") == 1
    assert len(steps(run)) == 6


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(tmp_path), "--keep-last", "1"]) == 2
    assert "no committed checkpoint" in capsys.readouterr().err

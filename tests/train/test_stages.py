from pathlib import Path
from typing import Any

import pytest

from mcore_train.quickstart.corpus import source_files, split_files
from mcore_train.quickstart.stages import Stages


def test_a_finished_stage_is_reused_until_its_inputs_change(tmp_path: Path) -> None:
    said: list[str] = []
    runs: list[str] = []
    stages = Stages(folder=tmp_path / "out", say=said.append)

    def run(value: int) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            runs.append("work")
            return {"double": 2 * value}

        return stages.run("sum", {"value": value}, work, lambda r: f"got {r['double']}")

    assert run(3) == run(3) == {"double": 6}
    assert len(runs) == 1
    assert said[1] == "sum: got 6 (done before)"
    assert run(4) == {"double": 8}
    assert len(runs) == 2


def test_a_stage_that_failed_is_not_done(tmp_path: Path) -> None:
    stages = Stages(folder=tmp_path, say=lambda line: None)

    def fail() -> dict[str, Any]:
        raise RuntimeError("cut short")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            stages.run("x", {}, fail, str)
    assert stages.run("x", {}, lambda: {"a": 1}, str) == {"a": 1}
    (tmp_path / "x.stage.json").write_text('{"inputs": ')
    with pytest.raises(RuntimeError):
        stages.run("x", {}, fail, str)


def test_corpus_is_text_split_by_document(tmp_path: Path) -> None:
    for index in range(400):
        path = tmp_path / f"d{index % 7}" / f"m{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {index}\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    files = source_files(tmp_path)
    assert len(files) == 400
    train, validation = split_files(files, tmp_path)
    assert sorted([*train, *validation]) == files
    assert 1 <= len(validation) <= 20
    moved = split_files([tmp_path / "x" / p.relative_to(tmp_path) for p in files], tmp_path / "x")
    assert len(moved[1]) == len(validation)

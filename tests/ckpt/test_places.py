"""Where checkpoints are: directories of unusual names, behind links, and copied by halves."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_ckpt.local import find_local, save_local
from mcore_parallel.layout import LayoutTensor, TensorLayout

WHOLE = TensorLayout.whole("model/w", (32, 8))


def tensors(value: float) -> dict[str, LayoutTensor]:
    return {"w": LayoutTensor(torch.full((32, 8), float(value)), WHOLE)}


def save(directory: Path, step: int, **options: Any) -> Path:
    return mcore_ckpt.save(
        directory, step=step, tensors=tensors(step), state={"config": {"model": {"size": 8}}},
        files={"tokenizer/vocabulary": b"a b"}, chunk_bytes=256, **options,
    )  # fmt: skip


def loaded(place: Path) -> set[float]:
    held = tensors(-1.0)
    mcore_ckpt.load(place, held)
    return set(held["w"].tensor.unique().tolist())


@pytest.mark.parametrize("name", ["läufe 日本", "100%25#x?y=z"])
def test_unusual_names(tmp_path: Path, name: str) -> None:
    run, new = tmp_path / name / "run", tmp_path / name / "new"
    save(run, 1)
    save(run, 2, compression="zstd")
    save(run, 3, file_bytes=1024)
    with mcore_ckpt.AsyncSaver() as saver:
        saver.save(run, step=4, tensors=tensors(4.0), state={})
    for step in range(1, 5):
        assert loaded(run / f"step_{step:08d}") == {step}
    assert main(["reshard", "--", str(run / "step_00000003"), str(new)]) == 0
    assert main(["diff", "--", str(run / "step_00000003"), str(new)]) == 0
    kinds = ["--from", "native", str(new), "--to", "dcp", str(new) + "-dcp"]
    assert main(["convert", *kinds]) == 0
    assert main(["prune", "--keep-last", "1", "--", str(run)]) == 0
    assert main(["verify", "--", str(run)]) == 0
    assert os.listdir(run) == ["step_00000004"]
    save_local(run.with_name("local"), step=5, tensors=tensors(5.0), state={})
    found = find_local(run.with_name("local"))
    assert found is not None
    assert found.step == 5


def test_a_path_beginning_with_a_dash_or_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("-run"), 1)
    assert main(["verify", "--", "-run"]) == 0
    assert main(["verify", "./-run/step_00000001"]) == 0
    found = mcore_ckpt.find("-run")
    assert found is not None
    assert found.path == tmp_path / "-run" / "step_00000001"


def test_a_directory_behind_a_link(tmp_path: Path) -> None:
    """A run saves, goes on and removes there as if there were no link, which stays."""
    real, link = tmp_path / "disk", tmp_path / "run"
    link.symlink_to(real)
    real.mkdir()
    for step in (1, 2, 3):
        save(link, step, keep_last=2)
    assert sorted(os.listdir(real)) == ["step_00000002", "step_00000003"]
    assert loaded(link) == loaded(link / "step_00000003") == {3}
    assert mcore_ckpt.latest(link) == link / "step_00000003"
    assert main(["prune", str(link), "--keep-last", "1"]) == 0
    assert os.listdir(real) == ["step_00000003"]
    assert link.is_symlink()


@pytest.mark.parametrize("order", [1, -1], ids=["marker first", "marker last"])
def test_a_checkpoint_that_is_copied_half_is_never_relied_on(tmp_path: Path, order: int) -> None:
    """Whatever of it is there, the last file cut off: the one before is found, or an error said."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    for step in (1, 2):
        save(source, step)
    shutil.copytree(source / "step_00000001", copy / "step_00000001")
    files = sorted(p for p in (source / "step_00000002").rglob("*") if p.is_file())[::order]
    for count in range(len(files)):
        shutil.rmtree(copy / "step_00000002", ignore_errors=True)
        for number, file in enumerate(files[: count + 1]):
            there = copy / file.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            data = file.read_bytes()
            there.write_bytes(data[: len(data) // 2] if number == count else data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = mcore_ckpt.find(copy, scan="quick" if count < len(files) - 1 else "full")
            assert found is not None
            assert found.step == 1, files[: count + 1]
            try:
                values = loaded(copy)
            except mcore_ckpt.CheckpointError:
                continue
        assert values <= {1.0, 2.0}
        assert len(values) == 1

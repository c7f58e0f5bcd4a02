"""The first thing that a new user does."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_train.cli import main

BIN = Path(sys.executable).parent
SHORTER = () if os.environ.get("NIGHTLY") else ("--steps", "120")
LAYOUTS = {
    "tensor": ["--nproc", "2", "--tensor", "2"],
    "pipeline": ["--nproc", "2", "--pipeline", "2"],
    "data": ["--nproc", "2"],
}


def quickstart(out: Path, *options: str, timeout: int = 900) -> str:
    command = [str(BIN / "mcore-train"), "quickstart", "--out", str(out), *options]
    environment = dict(os.environ)
    if "PYTEST_XDIST_WORKER" not in environment:  # as a user calls it
        environment.pop("OMP_NUM_THREADS", None)
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    return result.stdout


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The quickstart as it stands (fewer steps, but for the nightly run), with its output."""
    out = tmp_path_factory.mktemp("quickstart") / "full"
    said = quickstart(out, *SHORTER)
    return out, said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_learns(full: tuple[Path, str]) -> None:
    """Validation loss far below the unigram entropy; every promised file is there."""
    out, said = full
    data = json.loads((out / "data.stage.json").read_text())["results"]
    losses = [row["validation_loss"] for row in rows(out) if "validation_loss" in row]
    assert len(losses) >= 5
    assert min(losses[-3:]) <= (0.94 if SHORTER else 0.75) * data["unigram"]
    assert data["bigram"] < data["unigram"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    for part in ("train", "validation"):
        assert (out / "data" / f"{part}.idx").is_file()
    stages = ("corpus", "tokenizer", "data", "training", "resume", "picture")
    lines = said.splitlines()
    assert [line.partition(":")[0] for line in lines[: len(stages)]] == list(stages)
    assert lines[len(stages)].startswith("def ")
    assert "three commands to try next:" in lines
    # KiB of the largest process so far: at most 3 GB
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 3e9


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_resume_is_exact(full: tuple[Path, str]) -> None:
    out, _ = full
    resume = json.loads((out / "resume.stage.json").read_text())["results"]
    assert resume["first_validation_loss"] == resume["validation_before"]
    assert resume["step"] == resume["first_step"] + 5
    steps = [row["step"] for row in rows(out) if "loss" in row]
    assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_call_reuses_every_stage(
    full: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, first = full
    before = (out / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["quickstart", "--out", str(out), *SHORTER]) == 0
    again = capsys.readouterr().out
    assert again.count("(done before)") == 5
    assert (out / "metrics.jsonl").read_bytes() == before
    assert again.splitlines()[-5:] == first.splitlines()[-5:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not os.environ.get("NIGHTLY"),
    reason="a minute for each layout; tests/train/parity has them all",
)
def test_layouts_give_the_same_losses(full: tuple[Path, str]) -> None:
    """One process, tensor, pipeline and data parallel: 20 steps and 5 more, to 1e-5 relative."""
    out, _ = full
    curves = {}
    for name, options in {"one": [], **LAYOUTS}.items():
        folder = out.parent / name
        shutil.copytree(out, folder, ignore=shutil.ignore_patterns("checkpoints", "*.jsonl"))
        for stage in ("training", "resume"):
            (folder / f"{stage}.stage.json").unlink()
        said = quickstart(folder, "--steps", "20", *options)
        assert "tokenizer" in said
        found = rows(folder)
        curves[name] = [
            (row["step"], kind, row[kind])
            for row in found
            for kind in ("loss", "validation_loss")
            if kind in row
        ]
    reference = curves.pop("one")
    assert max(step for step, _, _ in reference) == 25
    for name, curve in curves.items():
        assert [point[:2] for point in curve] == [point[:2] for point in reference], name
        for (step, kind, value), (_, _, expected) in zip(curve, reference, strict=True):
            assert value == pytest.approx(expected, rel=1e-5), (name, step, kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "2", "--tensor", "4"], "4"),
        (["--nproc", "3"], "global_size"),
        (["--nproc", "4", "--tensor", "4"], "num_heads=6"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
    ],
)
def test_wrong_layouts_are_refused_before_anything_is_done(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quickstart", "--out", str(out), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mcore-train: ")
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()

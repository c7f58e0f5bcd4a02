"""Runs that save to object storage, and go on from it."""

import sys
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_parallel.testing import RankPool
from mcore_train.cli import main
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import pretrain, run_rank

sys.path.append(str(Path(__file__).parent))
from toy import toy


def config(directory: str, steps: int, **checkpoint: Any) -> TrainConfig:
    """A run that is cut short, or goes on: the schedule is that of the whole run."""
    return toy(
        model={"dropout": 0.1},
        checkpoint={"directory": directory, **checkpoint},
        schedule={"decay_steps": 4},
        steps=steps,
    )


def assert_same(one: str, other: str) -> None:
    a, b = mcore_ckpt.open(one), mcore_ckpt.open(other)
    assert (a.step, list(a)) == (b.step, list(b))
    for name in a:
        assert a[name].equal(b[name]), name


def test_going_on_is_the_same_as_not_stopping(tmp_path: Path) -> None:
    """U18: to a store of this process; in the background, compressed, and with retention."""
    bucket = f"memory:/{tmp_path}"
    pretrain(config(f"{bucket}/whole", 4), nproc=1)
    options = {"interval": 1, "keep_last": 2, "asynchronous": True, "compression": "zstd"}
    pretrain(config(f"{bucket}/parts", 2, **options), nproc=1)
    summary = pretrain(config(f"{bucket}/parts", 4, **options), nproc=1)
    assert (summary.first_step, summary.step) == (2, 4)
    assert summary.checkpoint == f"{bucket}/parts/step_00000004"
    assert_same(f"{bucket}/parts", f"{bucket}/whole")
    kept = [path.name for path in mcore_ckpt.list_checkpoints(f"{bucket}/parts")]
    assert kept == ["step_00000003", "step_00000004"]
    other = config(f"{bucket}/other", 4, load=f"{bucket}/parts", load_step=3)
    assert config_from_tree(config_to_tree(other)) == other
    assert pretrain(other, nproc=1).first_step == 3
    assert_same(f"{bucket}/other", f"{bucket}/whole")
    again = toy(model={"checkpoint": f"{bucket}/whole"})
    assert again.model == other.model
    with pytest.raises(ValueError, match=r"load_step=9: memory:.*/parts has no such.* use 4"):
        pretrain(config(f"{bucket}/x", 4, load=f"{bucket}/parts", load_step=9), nproc=1)


@pytest.mark.parametrize("kind", ["fsspec+file", "tensorstore+file"])
def test_several_ranks_go_on(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    """U18: over two ranks, from objects to objects, and from those to files."""
    run = f"{kind}://{tmp_path}/run"
    for steps in (2, 4):
        parts = config_to_tree(config(run, steps))
        found = ranks.run(run_rank, 2, parts, timeout=120)[0]
        assert found.checkpoint == f"{run}/step_{steps:08d}"
    whole = config_to_tree(config(str(tmp_path / "whole"), 4))
    ranks.run(run_rank, 2, whole, timeout=120)
    assert_same(run, str(tmp_path / "whole"))


def test_what_cannot_be_written_is_told_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"memory://x is in the memory of each of 2 ranks"):
        pretrain(config("memory://x", 4), nproc=2)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint.directory=.*/file/run cannot be written: "):
        pretrain(config(f"tensorstore+file://{tmp_path}/file/run", 4), nproc=1)
    arguments = ["--config", "quickstart", "--checkpoint.directory", "s4://bucket/run"]
    assert main(["pretrain", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "directory: s4://bucket/run: unknown scheme s4://, nearest valid is s3://" in err

"""The benchmark: it measures what it says, over real ranks, and reports it."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.bench import BenchReport, run, run_bench
from mcore_ckpt.bench.disk import drop_cache, name_of
from mcore_ckpt.cli import main
from mcore_parallel.testing import RankPool

MOUNTS = """\
/dev/root / ext4 rw 0 0
tmpfs /fast tmpfs rw 0 0
server:/x /fast/net\\040work nfs4 rw 0 0
"""


def test_everything_is_measured_in_one_run(
    ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pool(max_ranks: int) -> Any:
        assert max_ranks == 2
        return contextlib.nullcontext(ranks)

    monkeypatch.setattr(run, "RankPool", pool)
    arguments = ["bench", "--directory", str(tmp_path), "--size", "8MiB", "--ranks", "2"]
    assert main([*arguments, "--repeats", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["bytes"]) == (2, 8 << 20)
    assert found["page_cache_dropped"] is True
    assert len(found["seconds"]) == 11
    assert all(len(of) == 2 and min(of) >= 0 for of in found["seconds"].values())
    assert all(min(of) > 0 for name, of in found["seconds"].items() if name != "async stall")
    assert len(found["ratios"]) == 7
    assert not list(tmp_path.iterdir())


def test_ratios_are_of_the_best_turns() -> None:
    seconds = {
        name: [2.0, 1.0]
        for name in ("dcp save", "save flat", "raw read", "dcp load", "load", "load flat")
    }
    seconds |= {"save": [0.5, 4.0], "raw write": [0.4, 0.3], "host copy": [2.0, 2.0]}
    seconds |= {"async stall": [3.0, 1.0]}
    report = BenchReport(
        disk="/dev/root (ext4) at /", num_ranks=4, num_bytes=10**9, cold=False, seconds=seconds
    )
    assert report.ratios["save / DCP"] == 2.0
    assert report.ratios["save / raw write"] == pytest.approx(0.6)
    assert report.ratios["asynchronous stall / host copy"] == 0.5
    lines = report.lines()
    assert lines[0] == "1.00 GB over 4 ranks on /dev/root (ext4) at /; page cache warm"
    assert f"  {'save':<16}    0.500 s      2000 MB/s" in lines
    assert f"  {'save / DCP':<32} 2.00" in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bytes": 0}, "bytes is 0; nearest valid: 1"),
        ({"num_ranks": 0}, "ranks is 0; nearest valid: 1"),
        ({"num_ranks": 3, "num_bytes": 1}, "ranks is 3, which does not divide 1024; nearest: 2"),
    ],
)
def test_what_cannot_be_measured(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench(**options)  # type: ignore[arg-type]


def test_the_disk_is_named(tmp_path: Path) -> None:
    assert name_of(Path("/home/x"), MOUNTS) == "/dev/root (ext4) at /"
    assert name_of(Path("/fast/a"), MOUNTS) == "tmpfs (tmpfs) at /fast"
    assert name_of(Path("/fast/net work/a"), MOUNTS) == "server:/x (nfs4) at /fast/net work"
    assert name_of(Path("/faster"), MOUNTS) == "/dev/root (ext4) at /"
    assert " at /" in name_of(tmp_path)


def test_the_cache_is_dropped_and_files_stay(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert drop_cache(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"abc"

"""The benchmark: it measures what it says, over real ranks, and reports it."""

import contextlib
import json
import mmap
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_ckpt import checksum
from mcore_ckpt.bench import BenchReport, run, run_bench
from mcore_ckpt.bench.cases import Measured, in_order
from mcore_ckpt.bench.disk import drop_cache, name_of
from mcore_ckpt.bench.memory import forget_peak, peak_bytes
from mcore_ckpt.bench.run import Ratio
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
    monkeypatch.setattr(checksum, "LIBRARY", "zlib")
    arguments = ["bench", "--directory", str(tmp_path), "--size", "8MiB", "--ranks", "2"]
    assert main([*arguments, "--repeats", "2", "--small", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "pip install 'mcore-ckpt[fast]'" in err
    found = json.loads(out)
    assert found["checksums"] == "zlib"
    assert (found["ranks"], found["bytes"]) == (2, 8 << 20)
    assert found["page_cache_dropped"] is True
    for kind in ("seconds", "cpu_seconds"):
        assert len(found[kind]) == 13
        assert all(len(of) == 2 and min(of) >= 0 for of in found[kind].values())
    assert all(min(of) > 0 for of in found["seconds"].values())
    assert len(found["ratios"]) == 8
    assert len(found["cpu_ratios"]) == 6
    assert found["asynchronous_memory"] is None or found["asynchronous_memory"] >= 0
    assert not list(tmp_path.iterdir())


def test_checksums_without_zlib_ng_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    found = runpy.run_path(checksum.__file__)
    assert found["LIBRARY"] == "zlib"
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert found["checksum"](array) == checksum.checksum(array)


def test_ratios_are_of_turns_and_tell_their_spread() -> None:
    names = ("dcp save", "save flat", "raw read", "dcp load", "load", "load flat")
    seconds = {name: [2.0, 1.0, 1.0] for name in (*names, "host copy", "first host copy")}
    seconds |= {
        "save": [0.5, 4.0, 1.0],
        "raw write": [0.4, 2.0, 0.9],
        "save small": [1.0, 2.0, 3.0],
    }
    seconds |= {"stall": [3.0, 1.0, 0.5], "first stall": [1.0, 1.0, 1.0]}
    report = BenchReport(
        disk="/dev/root (ext4) at /",
        num_ranks=4,
        num_bytes=10**9,
        cold=False,
        measured=Measured(seconds=seconds, cpu=seconds, memory={"first stall": [10**8, 2 * 10**8]}),
    )
    assert report.ratios["save / DCP"] == Ratio(median=1.0, low=0.25, high=4.0)
    assert report.ratios["save / raw write"].median == pytest.approx(0.8)
    assert report.ratios["asynchronous stall / host copy"] == Ratio(median=1.0, low=0.5, high=1.5)
    assert report.cpu_ratios["save / DCP"] == report.ratios["save / DCP"]
    assert report.memory == pytest.approx(0.8)
    lines = report.lines()
    assert lines[0] == "1.00 GB over 4 ranks on /dev/root (ext4) at /; page cache warm"
    assert any("save small" in line and "MB/s" not in line for line in lines)
    assert any(line.split()[:3] == ["save", "1.000", "s"] for line in lines)
    assert any("save / DCP" in line and line.count("1.00  (0.25 to 4.00)") == 2 for line in lines)
    assert lines[-1].endswith("0.80")


def test_each_of_what_is_compared_is_first_in_turn() -> None:
    writes = ["raw write", "dcp save", "save", "save flat"]
    reads = ["raw read", "dcp load", "load", "load flat"]
    names = [*writes, *reads, "host copy", "stall"]
    turns = [in_order(names, turn) for turn in range(5)]
    assert turns[0] == turns[4] == names
    for number, name in enumerate(writes):
        assert sorted(turn.index(name) for turn in turns[:4]) == [0, 1, 2, 3]
        assert turns[number][0] == name
        assert turns[number][4] == reads[number]
        assert turns[number][8:] == names[8:]


def test_a_peak_of_memory(tmp_path: Path) -> None:
    if forget_peak():
        before = peak_bytes()
        held = mmap.mmap(-1, 64 << 20)  # of the system: malloc may have as much to give
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert len(held) * 0.9 < peak_bytes() - before < len(held) * 4
    (tmp_path / "clear_refs").mkdir()
    assert not forget_peak(tmp_path)
    (tmp_path / "status").write_text("VmRSS: 1 kB\n")
    with pytest.raises(ValueError, match="has no VmHWM"):
        peak_bytes(tmp_path)


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


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no directory .*nowhere to measure: make it first"):
        run_bench(tmp_path / "nowhere")


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

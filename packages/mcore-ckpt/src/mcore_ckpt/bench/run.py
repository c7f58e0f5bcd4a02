"""Running the measurements over a pool of ranks, and what they come to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mcore_ckpt import checksum
from mcore_ckpt.bench.cases import Measured, Turns, measure
from mcore_ckpt.bench.disk import drop_cache, name_of
from mcore_parallel.testing import RankPool

_SIZE = 4096  # of the square matrices, of 64 MiB each
_SMALL = 1024
_RATIOS = {  # what is compared: (ours, the other); above 1 ours is faster
    "save / DCP": ("save", "dcp save"),
    "save / raw write": ("save", "raw write"),
    "save from flat shards / DCP": ("save flat", "dcp save"),
    "load / DCP": ("load", "dcp load"),
    "load / raw read": ("load", "raw read"),
    "load into flat shards / DCP": ("load flat", "dcp load"),
}
_STALLS = {  # seconds of ours beside the other's, in memory that is new to both, or to neither
    "first asynchronous stall / host copy": ("first stall", "first host copy"),
    "asynchronous stall / host copy": ("stall", "host copy"),
}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratios of the turns, each of two things measured shortly after one another."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}  ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured, once for each turn.

    cold: whether the page cache was dropped before loads.
    """

    disk: str
    num_ranks: int
    num_bytes: int
    cold: bool
    measured: Measured

    @property
    def ratios(self) -> Mapping[str, Ratio]:
        """Speed beside others, above 1 where ours is faster; of stalls their time, beside 1."""
        return self._compare(self.measured.seconds)

    @property
    def cpu_ratios(self) -> Mapping[str, Ratio]:
        """As `ratios`, of the time of processors: what other work on the machine changes least."""
        return self._compare(self.measured.cpu, stalls=False)

    @property
    def memory(self) -> float | None:
        """Memory that a save in the background takes, beside the state; None when not known."""
        peaks = self.measured.memory.get("first stall")
        return max(peaks) * self.num_ranks / self.num_bytes if peaks else None

    @staticmethod
    def _compare(turns: Turns, *, stalls: bool = True) -> dict[str, Ratio]:
        pairs = {name: (other, ours) for name, (ours, other) in _RATIOS.items()}
        found = {}
        for name, (above, below) in {**pairs, **(_STALLS if stalls else {})}.items():
            values = [a / max(b, 1e-9) for a, b in zip(turns[above], turns[below], strict=True)]
            found[name] = Ratio(median=median(values), low=min(values), high=max(values))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "disk": self.disk,
            "ranks": self.num_ranks,
            "bytes": self.num_bytes,
            "page_cache_dropped": self.cold,
            "checksums": checksum.LIBRARY,
            "seconds": self.measured.seconds,
            "cpu_seconds": self.measured.cpu,
            "ratios": {name: asdict(ratio) for name, ratio in self.ratios.items()},
            "cpu_ratios": {name: asdict(ratio) for name, ratio in self.cpu_ratios.items()},
            "asynchronous_memory": self.memory,
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        cold = "page cache dropped before loads" if self.cold else "page cache warm"
        lines = [
            f"{self.num_bytes / 1e9:.2f} GB over {self.num_ranks} ranks on {self.disk}; {cold}",
            "medians (smallest to largest), and seconds of processors:",
            *(self._line(name) for name in self.measured.seconds),
            "ratios of the turns, and of seconds of processors:",
        ]
        cpu = self.cpu_ratios
        for name, ratio in self.ratios.items():
            lines.append(f"  {name:<37} {ratio!s:<24} {cpu.get(name, '')}".rstrip())
        if self.memory is not None:
            lines.append(f"  {'memory of an asynchronous save / state':<37} {self.memory:.2f}")
        return lines

    def _line(self, name: str) -> str:
        seconds = self.measured.seconds[name]
        middle, cpu = median(seconds), median(self.measured.cpu[name])
        rate = f"{self.num_bytes / max(middle, 1e-9) / 1e6:8.0f} MB/s"
        return (
            f"  {name:<16} {middle:8.3f} s ({min(seconds):.3f} to {max(seconds):.3f})  "
            f"{'' if 'small' in name else rate:>13}  {cpu:8.3f} s"
        )


def run_bench(
    directory: Path | None = None,
    *,
    num_bytes: int = 2 << 30,
    num_ranks: int = 4,
    num_small: int = 5000,
    repeats: int = 5,
) -> BenchReport:
    """Measure saving and loading beside torch's DCP and plain files, on one disk.

    directory: where; a temporary folder in it is removed at the end. Default: the system's.
    num_bytes: of the state, rounded up to whole matrices. It is in memory about four times.
    num_small: tensors of 4 KiB that are saved by themselves.
    repeats: turns, in each of which everything is measured once.

    Raises:
        ValueError: sizes below 1, a number of ranks that does not divide the matrices, or no such
            directory.
        OSError: the directory cannot be written.
    """
    for name, value in (
        ("bytes", num_bytes),
        ("ranks", num_ranks),
        ("small", num_small),
        ("repeats", repeats),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; nearest valid: 1")
    size = _SIZE if num_bytes >= 4 * _SIZE * _SIZE else _SMALL
    if size % num_ranks:
        nearest = min(
            (n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - num_ranks)
        )
        raise ValueError(f"ranks is {num_ranks}, which does not divide {size}; nearest: {nearest}")
    if directory is not None and not directory.is_dir():
        raise ValueError(f"there is no directory {directory} to measure: make it first")
    count = -(-num_bytes // (4 * size * size))
    with tempfile.TemporaryDirectory(prefix="mcore-ckpt-bench-", dir=directory) as folder:
        place = Path(folder)
        (place / "probe").write_bytes(b"x")
        cold = drop_cache(place)
        with RankPool(max_ranks=num_ranks) as pool:
            measured: Measured = pool.run(
                measure, num_ranks, place / "run", count, size, num_small, repeats, timeout=7200
            )[0]
        return BenchReport(
            disk=name_of(place),
            num_ranks=num_ranks,
            num_bytes=4 * count * size * size,
            cold=cold,
            measured=measured,
        )

"""Running the measurements over a pool of ranks, and what they come to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.bench.cases import Seconds, measure
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
    "asynchronous stall / host copy": ("async stall", "host copy"),
}


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured. seconds: of the slowest rank, once for each repeat.

    cold: whether the page cache was dropped before loads.
    """

    disk: str
    num_ranks: int
    num_bytes: int
    cold: bool
    seconds: Seconds

    def best(self, name: str) -> float:
        """Return the fastest of the repeats."""
        return min(self.seconds[name])

    @property
    def ratios(self) -> Mapping[str, float]:
        """Speed beside others, above 1 where ours is faster; of the stall: its time, beside 1."""
        result = {}
        for name, (ours, other) in _RATIOS.items():
            ratio = self.best(other) / max(self.best(ours), 1e-9)
            result[name] = 1 / ratio if "stall" in name else ratio
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "disk": self.disk,
            "ranks": self.num_ranks,
            "bytes": self.num_bytes,
            "page_cache_dropped": self.cold,
            "seconds": self.seconds,
            "ratios": dict(self.ratios),
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        cold = "page cache dropped before loads" if self.cold else "page cache warm"
        lines = [
            f"{self.num_bytes / 1e9:.2f} GB over {self.num_ranks} ranks on {self.disk}; {cold}",
            *(self._line(name) for name in self.seconds),
        ]
        lines += [f"  {name:<32} {ratio:.2f}" for name, ratio in self.ratios.items()]
        return lines

    def _line(self, name: str) -> str:
        rate = self.num_bytes / max(self.best(name), 1e-9) / 1e6
        return f"  {name:<16} {self.best(name):8.3f} s  {rate:8.0f} MB/s"


def run_bench(
    directory: Path | None = None,
    *,
    num_bytes: int = 2 << 30,
    num_ranks: int = 4,
    repeats: int = 3,
) -> BenchReport:
    """Measure saving and loading beside torch's DCP and plain files, on one disk.

    directory: where; a temporary folder in it is removed at the end. Default: the system's.
    num_bytes: of the state, rounded up to whole matrices. It is in memory about four times.
    repeats: turns, in each of which everything is measured once.

    Raises:
        ValueError: sizes below 1, or a number of ranks that does not divide the matrices.
        OSError: the directory cannot be written.
    """
    for name, value in (("bytes", num_bytes), ("ranks", num_ranks), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}; nearest valid: 1")
    size = _SIZE if num_bytes >= 4 * _SIZE * _SIZE else _SMALL
    if size % num_ranks:
        nearest = min(
            (n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - num_ranks)
        )
        raise ValueError(f"ranks is {num_ranks}, which does not divide {size}; nearest: {nearest}")
    count = -(-num_bytes // (4 * size * size))
    with tempfile.TemporaryDirectory(prefix="mcore-ckpt-bench-", dir=directory) as folder:
        place = Path(folder)
        (place / "probe").write_bytes(b"x")
        cold = drop_cache(place)
        with RankPool(max_ranks=num_ranks) as pool:
            seconds: Seconds = pool.run(
                measure, num_ranks, place / "run", count, size, repeats, timeout=3600
            )[0]
        return BenchReport(
            disk=name_of(place),
            num_ranks=num_ranks,
            num_bytes=4 * count * size * size,
            cold=cold,
            seconds=seconds,
        )

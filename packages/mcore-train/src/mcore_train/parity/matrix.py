"""Runs combinations of parallelism on a pool of ranks, and compares each with one process."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_parallel import ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.load import config_to_tree
from mcore_train.parity.cells import MOST_RANKS, Cell, full_matrix
from mcore_train.parity.covering import small_matrix, spread
from mcore_train.parity.families import FAMILIES, STEPS, family_config, write_documents
from mcore_train.parity.metric import LEAST_MARGIN, Record, Report, compare
from mcore_train.parity.run import comparable, record, record_rank

PRELOAD = ("mcore_train.parity", "mcore_parallel.data.fully", "torch._dynamo")
"""What every rank imports, and in part only when it first shards parameters."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a combination: refused with a reason, ended by an error, or compared."""

    cell: Cell
    error: str | None = None
    report: Report | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """`refused`, `fails`, `equal`, `differs`, or `unclear`: a router's choice is rounding."""
        if self.cell.refusal is not None:
            return "refused"
        if self.report is None:
            return "fails"
        if self.report.margin <= LEAST_MARGIN:
            return "unclear"
        return "equal" if self.report.holds else "differs"

    @property
    def is_good(self) -> bool:
        """Whether it is refused, or equal to one process."""
        return self.verdict in ("refused", "equal")

    @property
    def largest(self) -> dict[str, float]:
        """The largest difference of each kind, where there are any."""
        report = self.report
        kinds = [] if report is None else [kind for kind in report.kinds if kind != "copy"]
        return {kind: report.worst(kind).ratio for kind in kinds if report is not None}

    def __str__(self) -> str:
        """One line: the verdict, the combination, and the numbers or the reason."""
        line = f"{self.verdict:8}{self.cell}"
        reason = self.cell.refusal or self.error
        if reason is not None:
            return f"{line}: {reason}"
        assert self.report is not None
        failure = self.report.first_failure()
        first = "" if failure is None else f", first in {failure.kind} {failure.name}"
        largest = max(self.largest.values())
        return f"{line} on {self.cell.world_size}: {largest:.1e} at most{first}"

    def row(self) -> dict[str, Any]:
        """Return JSON-able values: the combination, its verdict and the largest differences."""
        cell, report = self.cell, self.report
        row: dict[str, Any] = {
            "family": cell["family"],
            "layout": cell.layout,
            "recompute": cell["recompute"],
            "documents": cell["documents"],
            "verdict": self.verdict,
        }
        if report is None:
            return {**row, "reason": cell.refusal or self.error}
        failure = report.first_failure()
        return {
            **row,
            "world_size": cell.world_size,
            "seconds": round(self.seconds, 2),
            "largest": {kind: _number(value) for kind, value in self.largest.items()},
            "first_failure": None if failure is None else f"{failure.kind} {failure.name}",
        }


def _number(value: float) -> float | None:
    """The value as JSON has it, which knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


class Matrix:
    """Runs of combinations; that of a family in one process is made once.

    `folder` receives the packed documents; without it a temporary one. Use it in a `with` block.
    """

    def __init__(self, pool: RankPool, *, folder: Path | None = None) -> None:
        self.pool = pool
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="mcore-parity-")
        self._folder = Path(folder or self._temporary.name)  # type: ignore[union-attr]
        self._references: dict[tuple[str, bool], Record] = {}

    def __enter__(self) -> Matrix:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def tokens(self, family: str, packed: bool) -> Path | None:
        """Return the prefix of the packed documents, which are written when first wanted."""
        if not packed:
            return None
        prefix = self._folder / f"documents_{family}"
        if not prefix.with_suffix(".idx").exists():
            write_documents(prefix, family)
        return prefix

    def reference(self, family: str, packed: bool) -> Record:
        """Return the run in one process, in which nothing is recomputed."""
        key = family, packed
        if key not in self._references:
            config = family_config(family, tokens=self.tokens(family, packed))
            found = record(comparable(config), ParallelMesh.single(), STEPS)
            assert found is not None
            self._references[key] = found
        return self._references[key]

    def run(self, cell: Cell, *, timeout: float = 300) -> Outcome:
        """Return what came of one combination.

        Raises:
            RankHungError: it did not end within `timeout` seconds.
        """
        if cell.refusal is not None:
            return Outcome(cell=cell)
        reference = self.reference(cell["family"], cell.is_packed)
        tree = config_to_tree(cell.config(self.tokens(cell["family"], cell.is_packed)))
        start = time.perf_counter()
        found = self.pool.run(record_rank, cell.world_size, tree, STEPS, timeout=timeout)[0]
        report = compare(reference, found, layout=cell.layout, world_size=cell.world_size)
        return Outcome(cell=cell, report=report, seconds=time.perf_counter() - start)


def run_matrix(cells: Iterable[Cell]) -> Iterator[Outcome]:
    """Yield what came of each combination, run on processes of this machine, on the CPU.

    What goes wrong in one of them is its outcome, and the others go on.
    """
    with RankPool(MOST_RANKS, preload=PRELOAD) as pool, Matrix(pool) as matrix:
        for cell in cells:
            try:
                yield matrix.run(cell)
            except Exception as error:
                reason = " ".join(str(error).split())
                yield Outcome(cell=cell, error=f"{type(error).__name__}: {reason}")


def choose_cells(matrix: str, *, family: str | None = None, part: str = "1/1") -> list[Cell]:
    """Return the combinations of the "small" or the "full" matrix: of a family, and a part of them.

    Part "i/n" of the small matrix is every n-th from the i-th on. The full one is first put in an
    order in which all values meet early, and cut into parts of equally many ranks in all: what one
    night has time for, the first of them with most that is new. What is refused is dealt out.

    Raises:
        ValueError: there is no such family, or the part is not of that form.
    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family {family!r}: known are {', '.join(FAMILIES)}")
    first, slash, count = part.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise ValueError(f"part {part!r} is not of the form I/N with 1 <= I <= N, such as 2/8")
    index, parts = int(first) - 1, int(count)
    cells = small_matrix() if matrix == "small" else full_matrix()
    mine = [cell for cell in cells if family in (None, cell["family"])]
    if matrix == "small":
        return mine[index::parts]
    runs = spread(cell for cell in mine if cell.refusal is None)
    refused = [cell for cell in mine if cell.refusal is not None]
    ends = list(accumulate(cell.world_size for cell in runs))
    nights = [(end - 1) * parts // ends[-1] for end in ends]
    mine = [cell for cell, night in zip(runs, nights, strict=True) if night == index]
    return mine + refused[index::parts]

"""Few combinations in which every two values meet, and orders in which every three meet early."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations

from mcore_train.parity.cells import AXES, Cell

Value = tuple[str, str]
Pair = tuple[Value, Value]
"""Two (axis, value), the axes in the order of `AXES`."""

_CANDIDATES = 10


def small_matrix(most_ranks: int = 8) -> list[Cell]:
    """Return combinations of at most `most_ranks` that cover every pair which any of them can.

    Greedy: of a few candidates the one is taken that covers most new pairs for its ranks. A
    candidate starts from a pair that is missing and takes, axis by axis, the value that adds most.
    """
    return _Covering(most_ranks).run()


def pairs_of(cell: Cell) -> Iterator[Pair]:
    """Yield the pairs that a combination covers."""
    yield from combinations(zip(AXES, cell.values, strict=True), 2)


def spread(cells: Iterable[Cell]) -> list[Cell]:
    """Return the combinations in an order in which every three values that go together meet early.

    Greedy: next is the one with most new triples for its ranks.
    """
    left = list(cells)
    triples = [list(combinations(zip(AXES, cell.values, strict=True), 3)) for cell in left]
    met: set[tuple[Value, ...]] = set()

    def rank(place: int) -> tuple[float, int]:
        new = sum(triple not in met for triple in triples[place])
        return -new / (left[place].world_size + 1), place

    # What one adds never grows: a rank that is stale is at best as good as it says.
    heap = [rank(place) for place in range(len(left))]
    heapq.heapify(heap)
    order: list[Cell] = []
    while heap:
        now = rank(heap[0][1])
        if now > heap[0]:
            heapq.heapreplace(heap, now)
        else:
            place = heapq.heappop(heap)[1]
            order.append(left[place])
            met.update(triples[place])
    return order


class _Covering:
    def __init__(self, most_ranks: int) -> None:
        self._most_ranks = most_ranks
        self._ranks: dict[tuple[str, ...], int | None] = {}
        self._uses: Counter[Value] = Counter()
        self._missing: dict[Pair, None] = {
            ((first, one), (second, other)): None
            for first, second in combinations(AXES, 2)
            for one in AXES[first]
            for other in AXES[second]
        }

    def run(self) -> list[Cell]:
        found: list[Cell] = []
        while self._missing:
            candidates = self._candidates()
            if candidates:
                found.append(max(candidates, key=self._worth))
                self._uses.update(zip(AXES, found[-1].values, strict=True))
                for pair in pairs_of(found[-1]):
                    self._missing.pop(pair, None)
        return _without_spare(found)

    def _candidates(self) -> list[Cell]:
        pairs, grown = list(self._missing), []
        for pair in pairs[:: -(-len(pairs) // _CANDIDATES)]:
            start = self._start(pair)
            if start is None:  # the two go together with nothing
                del self._missing[pair]
            else:
                grown.append(self._grown(start))
        return grown

    def _worth(self, cell: Cell) -> float:
        # A run costs a time for each rank, and some besides.
        return sum(pair in self._missing for pair in pairs_of(cell)) / (cell.world_size + 4)

    def _start(self, pair: Pair) -> dict[str, str] | None:
        """The pair alone, or with the one value more that makes it possible."""
        fixed = dict(pair)
        more = [{axis: value} for axis in AXES if axis not in fixed for value in AXES[axis]]
        starts = ({**fixed, **one} for one in [{}, *more])
        return next((start for start in starts if self._ranks_of(start)), None)

    def _grown(self, fixed: dict[str, str]) -> Cell:
        for axis in AXES:
            if axis not in fixed:
                options = [{**fixed, axis: value} for value in AXES[axis]]
                gains = {self._gain(option, axis): option for option in reversed(options)}
                fixed = gains[max(gains)]
        return Cell.of(fixed)

    def _gain(self, values: dict[str, str], axis: str) -> float:
        """New pairs of an axis's value with the others; fewer ranks count, then fewer uses."""
        ranks = self._ranks_of(values)
        if ranks is None:
            return -math.inf
        mine = axis, values[axis]
        new = sum(_pair(mine, other) in self._missing for other in values.items())
        return new - ranks / 4 - self._uses[mine] / 1000

    def _ranks_of(self, values: dict[str, str]) -> int | None:
        """The number of ranks; None where the values do not go together, or take too many."""
        cell = Cell.of(values)
        if cell.values not in self._ranks:
            good = not cell.is_vacuous and cell.refusal is None
            fits = good and cell.world_size <= self._most_ranks
            self._ranks[cell.values] = cell.world_size if fits else None
        return self._ranks[cell.values]


def _pair(one: Value, other: Value) -> Pair:
    axes = tuple(AXES)
    return (one, other) if axes.index(one[0]) < axes.index(other[0]) else (other, one)


def _without_spare(cells: list[Cell]) -> list[Cell]:
    """Leave out what the others cover, those of most ranks first."""
    counts = Counter(pair for cell in cells for pair in pairs_of(cell))
    kept = list(cells)
    for cell in sorted(cells, key=lambda cell: -cell.world_size):
        if all(counts[pair] > 1 for pair in pairs_of(cell)):
            kept.remove(cell)
            counts.subtract(pairs_of(cell))
    return kept

"""Which elements go from which local tensor to which: the copies between two sets of layouts."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mcore_parallel.layout.box import Box, dot
from mcore_parallel.layout.fragment import Fragment
from mcore_parallel.layout.layout import TensorLayout
from mcore_parallel.layout.tiling import first_tiling_error


class Place(NamedTuple):
    """Where one end of a copy lies: element g is `local.view(-1)[offset + Σ g[i]·strides[i]]`.

    `local` is the tensor called `key` on torch.distributed rank `rank`.
    """

    rank: int
    key: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of the global tensor `name`, from one place to another."""

    name: str
    box: Box
    source: Place
    target: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box, and of the views at both ends."""
        return self.box.shape

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        return self.box.numel


RankLayouts = Mapping[int, Mapping[str, TensorLayout]]


def plan(sources: RankLayouts, targets: RankLayouts) -> list[Copy]:
    """Return the copies that fill every fragment of `targets` from fragments of `sources`.

    Both map rank → local key → layout. Of several holders of an element the target's own rank is
    taken if it is one; else the rank that has been given the fewest elements to send so far. The
    result depends on the layouts only, not on the order of the mappings: every rank that computes
    it from the same layouts gets the same list, ordered by target rank and key. Target padding is
    left alone.

    Raises:
        ValueError: a target needs elements that no source holds (names the tensor and the box), or
            the two sides disagree on a tensor's shape.
    """
    holders: dict[str, _Holders] = {}
    for rank in sorted(sources):
        for key in sorted(sources[rank]):
            for fragment in sources[rank][key].fragments:
                name = fragment.name
                if name not in holders:
                    holders[name] = _Holders(name, fragment.global_shape)
                holders[name].add(rank, key, fragment)
    sent: dict[int, int] = defaultdict(int)
    copies: list[Copy] = []
    for rank in sorted(targets):
        for key in sorted(targets[rank]):
            for fragment in targets[rank][key].fragments:
                if not fragment.box.numel:
                    continue
                if fragment.name not in holders:
                    raise ValueError(f"{fragment.name}: no source holds this tensor")
                copies += holders[fragment.name].copies_to(rank, key, fragment, sent)
    return copies


class _Holders:
    """Who holds which boxes of one global tensor."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self.by_box: dict[Box, list[tuple[int, str, Fragment]]] = {}
        self.ranks: set[int] = set()
        self._sorted: list[Box] | None = None
        self._starts: list[int] = []
        self._dim = 0
        self._reach = 0
        self._one_tiling: bool | None = None

    def add(self, rank: int, key: str, fragment: Fragment) -> None:
        self.check_shape(fragment)
        if fragment.box.numel:
            self.by_box.setdefault(fragment.box, []).append((rank, key, fragment))
            self.ranks.add(rank)

    def check_shape(self, fragment: Fragment) -> None:
        if fragment.global_shape != self.shape:
            raise ValueError(
                f"{self.name}: global shapes {list(self.shape)} and "
                f"{list(fragment.global_shape)} differ"
            )

    def overlapping(self, box: Box) -> Iterator[Box]:
        """Yield the held boxes that may share points with `box`, in a fixed order."""
        if self._sorted is None:
            boxes = list(self.by_box)
            dims = range(len(self.shape))
            if dims:  # sort along the dimension with the most cuts: it tells boxes apart best
                self._dim = max(dims, key=lambda i: len({b.start[i] for b in boxes}))
                boxes.sort(key=lambda b: (b.start[self._dim], b.start, b.shape))
                self._starts = [b.start[self._dim] for b in boxes]
                self._reach = max(b.shape[self._dim] for b in boxes)
            self._sorted = boxes
        if not self._starts:
            yield from self._sorted
            return
        low = box.start[self._dim]
        first = bisect_left(self._starts, low - self._reach + 1)
        last = bisect_left(self._starts, low + box.shape[self._dim])
        yield from self._sorted[first:last]

    def copies_to(
        self, rank: int, key: str, target: Fragment, sent: dict[int, int]
    ) -> Iterator[Copy]:
        """Yield the copies that fill one target fragment, and count what each rank sends."""
        self.check_shape(target)
        for held, box in self._cover(rank, target.box):
            own = [holder for holder in self.by_box[held] if holder[0] == rank]
            source_rank, source_key, source = min(
                own or self.by_box[held], key=lambda holder: sent[holder[0]]
            )
            if source_rank != rank:
                sent[source_rank] += box.numel
            yield Copy(
                self.name,
                box,
                Place(source_rank, source_key, _address(source, box), source.strides),
                Place(rank, key, _address(target, box), target.strides),
            )

    def _cover(self, rank: int, box: Box) -> list[tuple[Box, Box]]:
        """Return disjoint boxes that make up `box`, each with the held box it is taken from."""
        if box in self.by_box and (
            rank not in self.ranks or any(holder[0] == rank for holder in self.by_box[box])
        ):
            return [(box, box)]
        found = [
            (held, common) for held in self.overlapping(box) if (common := held.intersect(box))
        ]
        if (
            self._are_one_tiling()
            or first_tiling_error(box, [common for _, common in found]) is None
        ):
            return found
        return self._greedy_cover(rank, box, found)

    def _are_one_tiling(self) -> bool:
        """Whether the boxes held, replicas taken once, tile the tensor: then any cut does."""
        if self._one_tiling is None:
            error = first_tiling_error(Box.whole(self.shape), list(self.by_box))
            self._one_tiling = error is None
        return self._one_tiling

    def _greedy_cover(
        self, rank: int, box: Box, found: list[tuple[Box, Box]]
    ) -> list[tuple[Box, Box]]:
        """Cover `box` where replicas are cut differently: own rank first, then the largest."""

        def order(pair: tuple[Box, Box]) -> tuple[bool, int]:
            own = any(holder[0] == rank for holder in self.by_box[pair[0]])
            return (not own, -pair[1].numel)

        cover: list[tuple[Box, Box]] = []
        missing = [box]
        for held, _ in sorted(found, key=order):
            rest: list[Box] = []
            for part in missing:
                if common := part.intersect(held):
                    cover.append((held, common))
                    rest += part.subtract(common)
                else:
                    rest.append(part)
            missing = rest
            if not missing:
                return cover
        hole = min(missing, key=lambda b: b.start)
        raise ValueError(f"{self.name} {list(self.shape)}: no source holds elements {hole}")


def _address(fragment: Fragment, box: Box) -> int:
    strides = fragment.strides
    return fragment.offset + dot(box.start, strides) - dot(fragment.box.start, strides)

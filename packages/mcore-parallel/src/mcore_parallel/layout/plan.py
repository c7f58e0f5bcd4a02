"""Which elements go from which local tensor to which: the copies between two sets of layouts."""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

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


class Copy(NamedTuple):
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
    with collecting_paused():
        return _plan(sources, targets)


@contextlib.contextmanager
def collecting_paused() -> Iterator[None]:
    """Hold back garbage collection: a plan is millions of objects that are all in use.

    Looking at them over and over takes more than half of the time of a large one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(sources: RankLayouts, targets: RankLayouts) -> list[Copy]:
    holders: dict[str, _Holders] = {}
    for rank in sorted(sources):
        for key in sorted(sources[rank]):
            for fragment in sources[rank][key].fragments:
                name = fragment.name
                if name not in holders:
                    holders[name] = _Holders(name, fragment.global_shape)
                holders[name].add(rank, key, fragment)
    geometries: dict[Any, Geometry] = {}  # one for all tensors that are cut alike
    sent: dict[int, int] = defaultdict(int)
    copies: list[Copy] = []
    for rank in sorted(targets):
        for key in sorted(targets[rank]):
            for fragment in targets[rank][key].fragments:
                if not fragment.box.numel:
                    continue
                found = holders.get(fragment.name)
                if found is None:
                    raise ValueError(f"{fragment.name}: no source holds this tensor")
                copies += found.copies_to(rank, key, fragment, sent, geometries)
    return copies


class Strided(Protocol):
    """Where the elements of a box lie in a local tensor: a `Fragment`, or what says the same."""

    @property
    def offset(self) -> int:
        """Address of the box's first element."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps between its elements."""


class _Holders:
    """Who holds which boxes of one global tensor."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name = name
        self.shape = shape
        self.by_box: dict[Box, list[tuple[int, str, Fragment]]] = {}
        self._holders: list[list[tuple[int, str, Fragment]]] = []
        self._geometry: Geometry | None = None

    def add(self, rank: int, key: str, fragment: Fragment) -> None:
        self.check_shape(fragment)
        if fragment.box.numel:
            self.by_box.setdefault(fragment.box, []).append((rank, key, fragment))

    def check_shape(self, fragment: Fragment) -> None:
        if fragment.global_shape != self.shape:
            raise ValueError(
                f"{self.name}: global shapes {list(self.shape)} and "
                f"{list(fragment.global_shape)} differ"
            )

    def copies_to(
        self,
        rank: int,
        key: str,
        target: Fragment,
        sent: dict[int, int],
        geometries: dict[Any, Geometry],
    ) -> Iterator[Copy]:
        """Yield the copies that fill one target fragment, and count what each rank sends."""
        self.check_shape(target)
        geometry = self._geometry
        if geometry is None:
            geometry = self._geometry = self._find_geometry(geometries)
        cuts = geometry.cover(rank, target.box)
        if isinstance(cuts, Box):
            raise ValueError(f"{self.name} {list(self.shape)}: no source holds elements {cuts}")
        for cut in cuts:
            holders = self._holders[cut.index]
            if cut.own:
                source_rank, source_key, source = next(h for h in holders if h[0] == rank)
            elif len(holders) == 1:
                source_rank, source_key, source = holders[0]
            else:
                source_rank, source_key, source = min(holders, key=lambda holder: sent[holder[0]])
            if source_rank != rank:
                sent[source_rank] += cut.numel
            yield Copy(
                self.name,
                cut.box,
                Place(source_rank, source_key, cut.address(source, 0), source.strides),
                Place(rank, key, cut.address(target, 1), target.strides),
            )

    def _find_geometry(self, geometries: dict[Any, Geometry]) -> Geometry:
        self._holders = list(self.by_box.values())
        ranks = tuple(tuple([holder[0] for holder in held]) for held in self._holders)
        cut = (self.shape, tuple(self.by_box), ranks)
        if cut not in geometries:
            geometries[cut] = Geometry(*cut)
        return geometries[cut]


class Cut:
    """Part of a target box that is taken from the held box number `index`.

    own: the target's rank holds that box itself.
    """

    __slots__ = ("_address", "_starts", "box", "index", "numel", "own")

    def __init__(self, box: Box, index: int, own: bool, held: Box, target: Box) -> None:
        self.box = box
        self.index = index
        self.own = own
        self.numel = box.numel
        self._starts = tuple(
            tuple(a - b for a, b in zip(box.start, outer.start, strict=True))
            for outer in (held, target)
        )
        self._address: dict[tuple[int, tuple[int, ...]], int] = {}

    def address(self, fragment: Strided, end: int) -> int:
        """Return where the part begins in a fragment: of the held box (0) or the target (1)."""
        at = (end, fragment.strides)
        distance = self._address.get(at)
        if distance is None:
            distance = self._address[at] = dot(self._starts[end], fragment.strides)
        return fragment.offset + distance


class Geometry:
    """Boxes of a tensor that are held, and by which ranks: the same for all tensors cut alike."""

    def __init__(
        self,
        shape: tuple[int, ...],
        boxes: tuple[Box, ...],
        ranks: tuple[tuple[int, ...], ...],
    ) -> None:
        self.shape = shape
        self.boxes = boxes
        self.ranks_of = [frozenset(held) for held in ranks]
        self.ranks = frozenset(rank for held in ranks for rank in held)
        self._number = {box: i for i, box in enumerate(boxes)}
        self._covers: dict[tuple[int, Box], list[Cut] | Box] = {}
        self._one_tiling: bool | None = None
        self._sorted = list(range(len(boxes)))
        self._starts: list[int] = []
        self._dim = 0
        self._reach = 0
        dims = range(len(shape))
        if dims and boxes:  # sort along the dimension with the most cuts: it tells them apart best
            dim = max(dims, key=lambda i: len({box.start[i] for box in boxes}))
            self._sorted.sort(key=lambda i: (boxes[i].start[dim], boxes[i].start, boxes[i].shape))
            self._starts = [boxes[i].start[dim] for i in self._sorted]
            self._reach = max(box.shape[dim] for box in boxes)
            self._dim = dim

    def cover(self, rank: int, box: Box) -> list[Cut] | Box:
        """Return the cuts that make up `box` on `rank`, or the first part that nobody holds."""
        at = (rank if rank in self.ranks else -1, box)
        found = self._covers.get(at)
        if found is None:
            found = self._covers[at] = self._cover(rank, box)
        return found

    def overlapping(self, box: Box) -> list[int]:
        """Return the numbers of the held boxes that may share points with `box`, in order."""
        if not self._starts:
            return self._sorted
        low = box.start[self._dim]
        first = bisect_left(self._starts, low - self._reach + 1)
        last = bisect_left(self._starts, low + box.shape[self._dim])
        return self._sorted[first:last]

    def _cover(self, rank: int, box: Box) -> list[Cut] | Box:
        same = self._number.get(box)
        if same is not None and (rank not in self.ranks or rank in self.ranks_of[same]):
            found = [(same, box)]
        else:
            found = [
                (i, common)
                for i in self.overlapping(box)
                if (common := self.boxes[i].intersect(box))
            ]
            whole = self._are_one_tiling()
            if not whole and first_tiling_error(box, [common for _, common in found]):
                greedy = self._greedy_cover(rank, box, found)
                if isinstance(greedy, Box):
                    return greedy
                found = greedy
        return [Cut(common, i, rank in self.ranks_of[i], self.boxes[i], box) for i, common in found]

    def _are_one_tiling(self) -> bool:
        """Whether the boxes held, replicas taken once, tile the tensor: then any cut does."""
        if self._one_tiling is None:
            error = first_tiling_error(Box.whole(self.shape), self.boxes)
            self._one_tiling = error is None
        return self._one_tiling

    def _greedy_cover(
        self, rank: int, box: Box, found: list[tuple[int, Box]]
    ) -> list[tuple[int, Box]] | Box:
        """Cover `box` where replicas are cut differently: own rank first, then the largest."""

        def order(pair: tuple[int, Box]) -> tuple[bool, int]:
            return (rank not in self.ranks_of[pair[0]], -pair[1].numel)

        cover: list[tuple[int, Box]] = []
        missing = [box]
        for i, _ in sorted(found, key=order):
            rest: list[Box] = []
            for part in missing:
                if common := part.intersect(self.boxes[i]):
                    cover.append((i, common))
                    rest += part.subtract(common)
                else:
                    rest.append(part)
            missing = rest
            if not missing:
                return cover
        return min(missing, key=lambda b: b.start)

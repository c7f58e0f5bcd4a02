"""What one rank gives to others and takes from them, found without a look at what they do.

Thousands of ranks hold their tensors in few ways, so what they hold is known by kinds of ranks (see
`Kind`). Who gives what to whom follows from that by fixed rules, which every rank applies to what
it holds itself. Both ends of a copy come to the same, and nobody plans for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mcore_ckpt.dtypes import converts, stored_type
from mcore_parallel.layout import Box, Copy, Place
from mcore_parallel.layout.plan import Cut, Geometry, collecting_paused

Shape = tuple[int, ...]


class Held(NamedTuple):
    """Part of a global tensor, where and as what the ranks of a kind hold it."""

    key: str
    dtype: torch.dtype
    global_shape: Shape
    box: Box
    offset: int
    strides: tuple[int, ...]


class Side:
    """The tensors that ranks of some kinds give, or those that they take.

    description: as `mcore_ckpt.alike.split` makes it.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._rows: list[list[Any]] = description["held"]
        self._cuts = [
            (
                stored_type(dtype).torch,
                [
                    (tuple(shape), Box(tuple(start), tuple(extent)), offset, tuple(strides))
                    for shape, start, extent, offset, strides in fragments
                ],
            )
            for dtype, _, fragments in description["cuts"]
        ]

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of the global tensors that it holds parts of."""
        for _, cut, *names in self._rows:
            for name, fragment in zip(names, self._cuts[cut][1], strict=True):
                yield name, fragment[0]

    def parts(self, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Held]]:
        """Yield the parts, that have elements, of the global tensors called so."""
        for key, cut, *names in self._rows:
            dtype, fragments = self._cuts[cut]
            for name, (shape, box, offset, strides) in zip(names, fragments, strict=True):
                if name in wanted and box.numel:
                    yield name, Held(key, dtype, shape, box, offset, strides)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """torch.distributed ranks that hold the same parts of the same tensors on both sides."""

    ranks: tuple[int, ...]
    sources: Side
    targets: Side

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Where each rank stands among them."""
        return {rank: place for place, rank in enumerate(self.ranks)}


class Wire(NamedTuple):
    """A copy, and the dtype in which its elements travel: the smaller one of both ends."""

    copy: Copy
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Own:
    """A rank's part in a transfer: what it copies by itself, sends, and receives, by the other."""

    local: Sequence[Copy]
    outgoing: Mapping[int, Sequence[Wire]]
    incoming: Mapping[int, Sequence[Wire]]


def own_copies(kinds: Sequence[Kind], rank: int) -> Own:
    """Return the part of `rank` in filling the targets of all kinds from the sources of all.

    Elements that a rank holds itself it takes from there. Of several others that hold them, those
    that take the same take from different ones, and different tensors of one shape do so in turn.
    What two ranks send each other is in the same order at both.

    Raises:
        ValueError: this rank's targets need elements that nobody holds, or of a dtype that does not
            convert; or shapes differ; names the tensor.
    """
    with collecting_paused():
        return _Planner(kinds, rank).plan()


class _Planner:
    def __init__(self, kinds: Sequence[Kind], rank: int) -> None:
        self._kinds = kinds
        self._rank = rank
        self._me = next(number for number, kind in enumerate(kinds) if rank in kind.places)
        mine = kinds[self._me]
        self._given = dict(mine.sources.shapes())
        self._taken = dict(mine.targets.shapes())
        self._turn = _turns(kinds)
        self._tensors: dict[str, _Tensor] = {}
        wanted = self._taken | self._given
        found = {side: list(side.parts(wanted)) for side in {kind.sources for kind in kinds}}
        for number, kind in enumerate(kinds):
            for name, held in found[kind.sources]:
                self._tensor(name, held.global_shape).add(number, held)

    def plan(self) -> Own:
        local: list[Copy] = []
        incoming: dict[int, list[Wire]] = defaultdict(list)
        for name, target in sorted(self._kinds[self._me].targets.parts(self._taken), key=_by_name):
            for cut, giving, source in self._sources(name, self._me, target):
                if not converts(source.dtype, target.dtype):
                    raise ValueError(f"{name}: {source.dtype} does not convert to {target.dtype}")
                giver = self._rank if cut.own else self._giver(name, giving)
                copy = _copy(name, cut, (source, target), giver, self._rank)
                if cut.own:
                    local.append(copy)
                else:
                    incoming[giver].append(Wire(copy, _narrower(source.dtype, target.dtype)))
        return Own(local=local, outgoing=self._outgoing(), incoming=incoming)

    def _outgoing(self) -> dict[int, list[Wire]]:
        outgoing: dict[int, list[Wire]] = defaultdict(list)
        sides = {kind.targets for kind in self._kinds}
        found = {side: sorted(side.parts(self._given), key=_by_name) for side in sides}
        for taking, kind in enumerate(self._kinds):
            if taking == self._me:
                continue
            for name, target in found[kind.targets]:
                for cut, giving, source in self._sources(name, taking, target):
                    if cut.own or giving != self._me:
                        continue
                    for taker in self._takers(name, taking):
                        copy = _copy(name, cut, (source, target), self._rank, taker)
                        outgoing[taker].append(Wire(copy, _narrower(source.dtype, target.dtype)))
        return outgoing

    def _sources(self, name: str, taking: int, target: Held) -> Iterator[tuple[Cut, int, Held]]:
        """Yield what makes up a target of a kind, and of each which kind gives it from where."""
        tensor = self._tensor(name, target.global_shape)
        for cut in tensor.cover(taking, target.box, self._geometries):
            holders = tensor.holders[cut.index]
            if cut.own:
                yield cut, taking, holders[taking]
            elif len(holders) == 1:
                yield cut, *next(iter(holders.items()))
            else:
                kinds = list(holders)
                giving = kinds[(self._turn[name] + taking) % len(kinds)]
                yield cut, giving, holders[giving]

    @cached_property
    def _geometries(self) -> dict[Any, Geometry]:
        return {}  # one for all tensors that are cut alike

    def _tensor(self, name: str, shape: Shape) -> _Tensor:
        tensor = self._tensors.setdefault(name, _Tensor(name, shape))
        if tensor.shape != shape:
            raise ValueError(f"{name}: global shapes {list(tensor.shape)} and {list(shape)} differ")
        return tensor

    def _begin(self, name: str, giving: int, taking: int) -> int:
        """Return the place among the givers of the one that the first of the takers takes from.

        The others follow in turn. Every tensor of a shape goes on: where there are more givers than
        takers, to the next ones that have not had one.
        """
        givers, takers = (len(self._kinds[number].ranks) for number in (giving, taking))
        turn, blocks = self._turn[name] + taking, givers // takers
        return turn % blocks * takers if blocks > 1 else turn % givers

    def _giver(self, name: str, giving: int) -> int:
        """Return the rank of a kind that this one takes from."""
        ranks, place = self._kinds[giving].ranks, self._kinds[self._me].places[self._rank]
        return ranks[(self._begin(name, giving, self._me) + place) % len(ranks)]

    def _takers(self, name: str, taking: int) -> Sequence[int]:
        """Return the ranks of a kind that take from this one."""
        mine = self._kinds[self._me]
        first = mine.places[self._rank] - self._begin(name, self._me, taking)
        return self._kinds[taking].ranks[first % len(mine.ranks) :: len(mine.ranks)]


class _Tensor:
    """Which kinds hold which boxes of a global tensor."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self._by_box: dict[Box, dict[int, Held]] = {}
        self._geometry: Geometry | None = None

    def add(self, kind: int, held: Held) -> None:
        self._by_box.setdefault(held.box, {}).setdefault(kind, held)

    @cached_property
    def holders(self) -> list[dict[int, Held]]:
        """Of each box, in the order of the geometry's, which kinds hold it where."""
        return list(self._by_box.values())

    def cover(self, kind: int, box: Box, geometries: dict[Any, Geometry]) -> list[Cut]:
        """Return the cuts that make up what a kind takes; ValueError when nobody holds some."""
        if self._geometry is None:
            if not self.holders:
                raise ValueError(f"{self.name}: no source holds this tensor")
            key = (self.shape, tuple(self._by_box), tuple(map(tuple, self.holders)))
            if key not in geometries:
                geometries[key] = Geometry(*key)
            self._geometry = geometries[key]
        cuts = self._geometry.cover(kind, box)
        if isinstance(cuts, Box):
            raise ValueError(f"{self.name} {list(self.shape)}: no source holds elements {cuts}")
        return cuts


def _turns(kinds: Sequence[Kind]) -> dict[str, int]:
    """Number all global tensors that are taken, those of one shape one after the other."""
    shapes: dict[str, Shape] = {}
    for side in dict.fromkeys(kind.targets for kind in kinds):
        shapes.update(side.shapes())
    order = sorted(shapes, key=lambda name: (shapes[name], name))
    return {name: number for number, name in enumerate(order)}


def _by_name(part: tuple[str, Held]) -> str:
    return part[0]


def _copy(name: str, cut: Cut, ends: Sequence[Held], giver: int, taker: int) -> Copy:
    source, target = ends
    return Copy(
        name,
        cut.box,
        Place(giver, source.key, cut.address(source, 0), source.strides),
        Place(taker, target.key, cut.address(target, 1), target.strides),
    )


def _narrower(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    return target if target.itemsize < source.itemsize else source

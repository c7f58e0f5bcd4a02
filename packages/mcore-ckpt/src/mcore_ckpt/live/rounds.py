"""The copies of a transfer, cut into rounds in which no rank stages more than so many bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_ckpt.dtypes import Array
from mcore_ckpt.live.own import Own, Wire
from mcore_parallel.layout import Box, Copy

_NUMBER = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy, or part of one, and the dtype in which its elements travel."""

    copy: Copy
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that cross."""
        return self.copy.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Round:
    """What one rank sends and receives at one time: pieces by the other rank."""

    outgoing: Mapping[int, Sequence[Piece]]
    incoming: Mapping[int, Sequence[Piece]]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One rank's part of a transfer: copies of its own, then rounds with others.

    Every rank has the same number of rounds, some of them perhaps empty.
    """

    local: Sequence[Copy]
    rounds: Sequence[Round]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to others."""
        return sum(p.num_bytes for r in self.rounds for ps in r.outgoing.values() for p in ps)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives from others."""
        return sum(p.num_bytes for r in self.rounds for ps in r.incoming.values() for p in ps)


class Pairs:
    """What goes from which rank to which, as every rank knows of all: bytes, and in how many parts.

    rows: of each rank, in group order, what `encode_loads` returns there.
    """

    def __init__(self, rows: Sequence[str]) -> None:
        found = [np.frombuffer(base64.b64decode(row), _NUMBER).reshape(-1, 3) for row in rows]
        self.size = len(rows)
        self.source = np.repeat(np.arange(self.size), [len(of_rank) for of_rank in found])
        self.target, self.num_bytes, self.parts = np.concatenate(found).T

    def first_rounds(self, max_bytes: int) -> tuple[Array, int]:
        """Return in which round each pair begins, and how many rounds there are.

        A pair goes into the first round in which both its ends have room left; one of many parts
        has as many rounds for itself at both ends. The pairs (i, i + k) of one distance k have no
        rank in common but those that send and receive, so they are all dealt with at one time,
        and ranks that have nothing to do with each other do not wait.
        """
        first = np.zeros(len(self.source), np.int64)
        at = np.zeros((2, self.size), np.int64)  # the last round of each rank, sending or receiving
        used = np.zeros((2, self.size), np.int64)  # bytes in it
        distance = (self.target - self.source) % self.size
        # Numbers of 16 bits are sorted in linear time.
        order = np.argsort(distance.astype(np.min_scalar_type(self.size)), kind="stable")
        for pairs in np.split(order, np.flatnonzero(np.diff(distance[order])) + 1):
            ends = (0, self.source[pairs]), (1, self.target[pairs])
            size = np.where(self.parts[pairs] > 1, max_bytes, self.num_bytes[pairs])
            number = np.maximum(*(at[end] for end in ends))
            taken = np.maximum(*(np.where(at[end] == number, used[end], 0) for end in ends))
            full = (taken > 0) & (taken + size > max_bytes)
            number, taken = number + full, np.where(full, 0, taken)
            first[pairs] = number
            for end in ends:
                at[end] = number + self.parts[pairs] - 1
                used[end] = taken + size
        return first, int(at.max()) + 1 if len(first) else 0


def encode_loads(own: Own, ranks: Sequence[int], max_bytes: int) -> str:
    """Return what a rank sends to whom, as text for all the others.

    Thousands of ranks have millions of pairs: as numbers in a row they are quickly read.
    """
    place = {rank: index for index, rank in enumerate(ranks)}
    rows = [
        (place[taker], sum(map(_num_bytes, parts[0])), len(parts))
        for taker, wires in own.outgoing.items()
        for parts in [_parts(wires, max_bytes)]
    ]
    return base64.b64encode(np.array(rows, _NUMBER).tobytes()).decode()


def schedule(own: Own, pairs: Pairs, ranks: Sequence[int], rank: int, max_bytes: int) -> Schedule:
    """Return what `rank` does in which round.

    own: its part. pairs: those of all ranks, which are `ranks` in group order. A copy of more than
    `max_bytes` is cut.
    """
    first, count = pairs.first_rounds(max_bytes)
    place = {rank: index for index, rank in enumerate(ranks)}
    rounds: list[tuple[dict[int, list[Piece]], dict[int, list[Piece]]]]
    rounds = [({}, {}) for _ in range(count)]
    me = place[rank]
    sides = (pairs.source, pairs.target, own.outgoing), (pairs.target, pairs.source, own.incoming)
    for direction, (this, other, by_rank) in enumerate(sides):
        mine = np.flatnonzero(this == me)
        begin = dict(zip(other[mine].tolist(), first[mine].tolist(), strict=True))
        for peer, wires in by_rank.items():
            for number, part in enumerate(_parts(wires, max_bytes), begin[place[peer]]):
                rounds[number][direction][peer] = part
    return Schedule(local=own.local, rounds=[Round(*both) for both in rounds])


def _parts(wires: Sequence[Wire], max_bytes: int) -> list[list[Piece]]:
    """Return the pieces of some copies in parts of at most `max_bytes`, or of one piece."""
    parts: list[list[Piece]] = [[]]
    used = 0
    for wire in wires:
        for copy in cut(wire.copy, max(1, max_bytes // wire.dtype.itemsize)):
            piece = Piece(copy, wire.dtype)
            if used and used + piece.num_bytes > max_bytes:
                parts.append([])
                used = 0
            parts[-1].append(piece)
            used += piece.num_bytes
    return parts


def _num_bytes(piece: Piece) -> int:
    return piece.num_bytes


def cut(copy: Copy, max_elements: int) -> Iterator[Copy]:
    """Yield a copy in parts of at most `max_elements`, halving its longest dimension."""
    if copy.numel <= max_elements:
        yield copy
        return
    shape = copy.shape
    dim = max(range(len(shape)), key=lambda i: (shape[i], -i))
    half = shape[dim] // 2
    for skipped, size in ((0, half), (half, shape[dim] - half)):
        start = list(copy.box.start)
        start[dim] += skipped
        source, target = (
            place._replace(offset=place.offset + skipped * place.strides[dim])
            for place in (copy.source, copy.target)
        )
        box = Box(tuple(start), (*shape[:dim], size, *shape[dim + 1 :]))
        yield from cut(Copy(copy.name, box, source, target), max_elements)

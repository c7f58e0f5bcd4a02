"""The copies of a transfer, cut into rounds in which no rank stages more than so many bytes.

Pure arithmetic: every rank computes the same rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore_parallel.layout import Box, Copy

Dtypes = Mapping[int, Mapping[str, torch.dtype]]


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


def schedule(
    copies: Sequence[Copy], sources: Dtypes, targets: Dtypes, rank: int, max_bytes: int
) -> Schedule:
    """Return what `rank` does of the copies of all ranks.

    sources, targets: dtypes of the local tensors by rank and key; elements travel in the smaller
    one. A copy of more than `max_bytes` is cut. A piece goes into the first round in which both its
    ends have room left, so that ranks that have nothing to do with each other do not wait.
    """
    sending: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))  # rank → round, bytes so far
    receiving: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    mine: dict[int, tuple[dict[int, list[Piece]], dict[int, list[Piece]]]] = {}
    count = 0
    for copy in copies:
        source, target = copy.source, copy.target
        if source.rank == target.rank:
            continue
        dtype = _wire(sources[source.rank][source.key], targets[target.rank][target.key])
        for part in cut(copy, max(1, max_bytes // dtype.itemsize)):
            piece = Piece(part, dtype)
            number = _first_round(
                sending[source.rank], receiving[target.rank], piece.num_bytes, max_bytes
            )
            for ends, end in ((sending, source.rank), (receiving, target.rank)):
                used = ends[end][1] if ends[end][0] == number else 0
                ends[end] = (number, used + piece.num_bytes)
            count = max(count, number + 1)
            if rank in (source.rank, target.rank):
                outgoing, incoming = mine.setdefault(number, ({}, {}))
                if source.rank == rank:
                    outgoing.setdefault(target.rank, []).append(piece)
                else:
                    incoming.setdefault(source.rank, []).append(piece)
    local = [copy for copy in copies if copy.source.rank == rank == copy.target.rank]
    return Schedule(
        local=local, rounds=[Round(*mine.get(number, ({}, {}))) for number in range(count)]
    )


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


def _wire(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    return target if target.itemsize < source.itemsize else source


def _first_round(
    sender: tuple[int, int], receiver: tuple[int, int], size: int, max_bytes: int
) -> int:
    number = max(sender[0], receiver[0])
    used = max(so_far if at == number else 0 for at, so_far in (sender, receiver))
    return number + 1 if used and used + size > max_bytes else number

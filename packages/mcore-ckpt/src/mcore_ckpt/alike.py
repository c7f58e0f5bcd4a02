"""Ranks that hold the same parts of the same tensors: replicas of one another.

Thousands of ranks have few kinds of holdings: those of one tensor- and pipeline-parallel rank are
alike but for which replica they are. So the ranks of a kind are described once and planned for as
one, and which of them does what is settled in the end.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any, TypeAlias

Runs: TypeAlias = list[list[int]]
"""[replica, of how many, of how many fragments in a row], for the fragments of a local tensor."""


def digest_of(description: Mapping[str, Any]) -> str:
    """Return a digest of what `describe` says of a rank's tensors."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def split(description: Mapping[str, Any]) -> tuple[dict[str, Any], list[Runs]]:
    """Return what `describe` says without replicas, and the replicas alone.

    Thousands of tensors are cut in few ways, so each is described once. `cuts`: the dtype and shape
    of a local tensor, and of each fragment in it the global shape, the start and shape of the box,
    the offset and the strides. `held`: each local key, the number of its cut, and the names of the
    fragments. The replicas are those of every cut.
    """
    numbers: dict[Any, int] = {}
    held = []
    for key, entry in description.items():
        rows = entry["fragments"]
        cut = (entry["dtype"], tuple(entry["shape"]), tuple([tuple(row[1:6]) for row in rows]))
        replicas = tuple([tuple(row[6:]) for row in rows])
        number = numbers.setdefault((cut, replicas), len(numbers))
        held.append([key, number, *[row[0] for row in rows]])
    shared = {"cuts": [cut for cut, _ in numbers], "held": held}
    return shared, [_runs(replicas) for _, replicas in numbers]


def _runs(replicas: Sequence[tuple[int, int]]) -> Runs:
    runs: Runs = []
    for replica, count in replicas:
        if runs and runs[-1][:2] == [replica, count]:
            runs[-1][2] += 1
        else:
            runs.append([replica, count, 1])
    return runs


def alike(descriptions: Sequence[Mapping[str, Any]]) -> list[Alike]:
    """Return the kinds of ranks that have described their tensors so, in the order of the ranks."""
    parts = [split(description) for description in descriptions]
    digests = [digest_of(shared) for shared, _ in parts]
    return grouped([shared for shared, _ in parts], digests, [runs for _, runs in parts])


def grouped(
    descriptions: Sequence[Mapping[str, Any] | None],
    digests: Sequence[str],
    replicas: Sequence[Sequence[Runs]],
) -> list[Alike]:
    """As `alike`, of what `split` returns; of ranks with one digest the first has to describe."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        members[digest].append(rank)
    return [
        Alike(
            ranks=tuple(ranks),
            description=descriptions[ranks[0]] or {"cuts": [], "held": []},
            replicas=[replicas[rank] for rank in ranks],
        )
        for ranks in members.values()
    ]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Ranks within the group that hold the same, what they hold, and as which replicas.

    The latter are what `split` returns of each of the ranks.
    """

    ranks: tuple[int, ...]
    description: Mapping[str, Any]
    replicas: Sequence[Sequence[Runs]]

    def replicas_of(self, cut: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield which of how many replicas a cut's fragments are, each on rank after rank."""
        runs = [of_rank[cut] for of_rank in self.replicas]
        ends = [list(accumulate(count for *_, count in of_rank)) for of_rank in runs]
        begin = 0
        for end in sorted({end for of_rank in ends for end in of_rank}):
            held = []
            for of_rank, rows in zip(ends, runs, strict=True):
                replica, count, _ = rows[bisect_right(of_rank, end - 1)]
                held.append((replica, count))
            yield from repeat(tuple(held), end - begin)
            begin = end

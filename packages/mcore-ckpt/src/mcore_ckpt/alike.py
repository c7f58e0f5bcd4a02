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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

from mcore_parallel.layout import Box, Fragment, TensorLayout, check_tiling

Runs: TypeAlias = list[list[int]]
"""[replica, of how many, of how many fragments in a row], for all fragments of a description."""


def digest_of(description: Mapping[str, Any]) -> str:
    """Return a digest of what `describe` says of a rank's tensors."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def split(description: Mapping[str, Any]) -> tuple[dict[str, Any], Runs]:
    """Return what `describe` says without replicas, and the replicas alone."""
    shared: dict[str, Any] = {}
    runs: Runs = []
    for key, entry in description.items():
        shared[key] = {**entry, "fragments": [row[:6] for row in entry["fragments"]]}
        for *_, replica, count in entry["fragments"]:
            if runs and runs[-1][:2] == [replica, count]:
                runs[-1][2] += 1
            else:
                runs.append([replica, count, 1])
    return shared, runs


def alike(descriptions: Sequence[Mapping[str, Any]]) -> list[Alike]:
    """Return the kinds of ranks that have described their tensors so, in the order of the ranks."""
    parts = [split(description) for description in descriptions]
    digests = [digest_of(shared) for shared, _ in parts]
    return grouped([shared for shared, _ in parts], digests, [runs for _, runs in parts])


def grouped(
    descriptions: Sequence[Mapping[str, Any] | None],
    digests: Sequence[str],
    replicas: Sequence[Runs],
) -> list[Alike]:
    """As `alike`, of what `split` returns; of ranks with one digest the first has to describe."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        members[digest].append(rank)
    return [
        Alike(
            ranks=tuple(ranks),
            description=descriptions[ranks[0]] or {},
            replicas=[replicas[rank] for rank in ranks],
        )
        for ranks in members.values()
    ]


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Ranks within the group that hold the same, what they hold, and as which replicas."""

    ranks: tuple[int, ...]
    description: Mapping[str, Any]
    replicas: Sequence[Runs]

    @cached_property
    def layouts(self) -> dict[str, TensorLayout]:
        """The layouts of each of the ranks by local key, as if there were no replicas."""
        return {
            key: TensorLayout(
                shape=tuple(entry["shape"]), fragments=tuple(map(fragment, entry["fragments"]))
            )
            for key, entry in self.description.items()
        }

    def stretches(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Return where fragments end that are the same replicas, and which, rank by rank."""
        ends = [list(accumulate(count for *_, count in runs)) for runs in self.replicas]
        result = []
        for end in sorted({end for of_rank in ends for end in of_rank}):
            held = []
            for of_rank, runs in zip(ends, self.replicas, strict=True):
                replica, count, _ = runs[bisect_right(of_rank, end - 1)]
                held.append((replica, count))
            result.append((end, tuple(held)))
        return result


def fragment(row: Sequence[Any]) -> Fragment:
    """Return the fragment that `describe` wrote down, or `split` without its replica."""
    name, global_shape, start, shape, offset, strides, *replicas = row
    replica, count = replicas or (0, 1)
    return Fragment(
        name=name,
        global_shape=tuple(global_shape),
        box=Box(tuple(start), tuple(shape)),
        offset=offset,
        strides=tuple(strides),
        replica=replica,
        num_replicas=count,
    )


def check_kinds(kinds: Sequence[Alike]) -> None:
    """Check that the tensors of all ranks are tiled once per replica, as `check_tiling` does.

    Of tensors that are cut alike and held by ranks of the same kinds one is looked at.
    """
    held: dict[str, list[tuple[Fragment, TensorLayout, tuple[tuple[int, int], ...]]]]
    held = defaultdict(list)
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    for kind in kinds:
        stretches = iter(kind.stretches())
        end = count = 0
        replicas: tuple[tuple[int, int], ...] = ()
        for layout in kind.layouts.values():
            for part in layout.fragments:
                if count == end:
                    end, replicas = next(stretches)
                    numbers.setdefault(replicas, len(numbers))
                count += 1
                held[part.name].append((part, layout, replicas))
    right: set[tuple[Any, ...]] = set()
    for parts in held.values():
        cut = tuple([(p.global_shape, p.box, numbers[replicas]) for p, _, replicas in parts])
        if cut not in right:
            check_tiling(
                TensorLayout(
                    shape=layout.shape,
                    fragments=(replace(part, replica=replica, num_replicas=count),),
                )
                for part, layout, replicas in parts
                for replica, count in replicas
            )
            right.add(cut)

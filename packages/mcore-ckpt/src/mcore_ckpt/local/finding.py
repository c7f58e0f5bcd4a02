"""Finding the newest local save of which every share is somewhere."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.addresses import local_path
from mcore_ckpt.agreement import together
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.local.share import Share, ShareName, read_share
from mcore_parallel.group import Group


@dataclass(frozen=True, kw_only=True)
class FoundLocal:
    """A complete local save: its step, its state, and which rank provides whose share.

    path: the directory, on this rank. providers: the rank (within the group) that reads the share
    of each rank that saved. descriptions: of the tensors of each share. shares: those that this
    rank provides, by the rank that saved them.
    """

    path: Path
    step: int
    state: Mapping[str, Any]
    providers: Sequence[int]
    descriptions: Sequence[Mapping[str, Any]]
    shares: Mapping[int, Share]


def find_local(directory: str | os.PathLike[str], group: Group | None = None) -> FoundLocal | None:
    """Return the newest local save that is complete, on every rank; None when there is none.

    Every rank of `group` (default: this process alone) calls it with its own machine's directory;
    the ranks may be others, and more or fewer, than those that saved. A save is complete when the
    share of every rank that saved is in some rank's directory, its own or a copy. Damaged files are
    as good as none. Communicates over the group's CPU twin.

    Raises:
        CheckpointError: on every rank: a directory cannot be read.
    """
    folder = local_path(directory).absolute()
    group = (group or Group.single()).cpu
    what = f"finding a local checkpoint in {folder} failed"
    held: dict[ShareName, Share] = {}

    def look() -> list[tuple[int, str, int, int]]:
        held.update(_held(folder))
        return [(name.step, name.save, name.rank, name.size) for name in held]

    listed = together(group, what, look)
    holders: dict[tuple[int, str, int], dict[int, list[int]]] = defaultdict(dict)
    for rank, rows in enumerate(listed):
        for step, save, saved_by, size in rows:
            holders[step, save, size].setdefault(saved_by, []).append(rank)
    complete = [key for key, shares in holders.items() if len(shares) == key[2]]
    if not complete:
        return None
    step, save, size = newest = max(complete)
    providers = _providers(holders[newest], size, group.size)
    mine = {
        rank: held[ShareName(step=step, save=save, rank=rank, size=size)]
        for rank, provider in enumerate(providers)
        if provider == group.rank
    }
    told = together(
        group,
        what,
        lambda: [(rank, share.description, share.state) for rank, share in mine.items()],
    )
    rows = sorted((row for of_rank in told for row in of_rank), key=lambda row: int(row[0]))
    return FoundLocal(
        path=folder,
        step=step,
        state=rows[0][2],
        providers=providers,
        descriptions=[description for _, description, _ in rows],
        shares=mine,
    )


def _held(folder: Path) -> dict[ShareName, Share]:
    found: dict[ShareName, Share] = {}
    if not folder.is_dir():
        return found
    for entry in sorted(os.listdir(folder)):
        name = ShareName.parse(entry)
        if name is None:
            continue
        try:
            found[name] = read_share(folder / entry)
        except (CheckpointError, FileNotFoundError):  # a copy elsewhere may be whole
            continue
    return found


def _providers(holders: Mapping[int, Sequence[int]], size: int, group_size: int) -> list[int]:
    """Return who provides each share: its own rank where that has it, else who has least to do."""
    given = [0] * group_size
    providers = []
    for saved_by in range(size):
        own = saved_by if saved_by in holders[saved_by] else None
        chosen = min(holders[saved_by], key=lambda rank: (rank != own, given[rank], rank))
        given[chosen] += 1
        providers.append(chosen)
    return providers

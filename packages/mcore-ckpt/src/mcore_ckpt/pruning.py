"""Removing old checkpoints of a directory, also while a run saves there."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mcore_ckpt.addresses import Place, absolute, place, storage_at
from mcore_ckpt.commit import (
    StepDirectory,
    newest,
    read_manifest,
    remove_checkpoint,
    replaced,
    sweep_removed,
)
from mcore_ckpt.commit import scan as directories
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.request import check_retention
from mcore_ckpt.scanning import Scan, check_scan, scan_part
from mcore_ckpt.storage import Storage

_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What `prune` removed (or would remove), oldest first, and the checkpoint that it went by."""

    newest: Place
    removed: tuple[Place, ...]


def prune(
    directory: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    dry_run: bool = False,
    scan: Scan = "quick",
    storage: Storage | None = None,
) -> Pruned:
    """Remove the checkpoints of a directory that need not be kept.

    Kept are the newest, the newest `keep_last` (that one counted), and steps that are multiples of
    `keep_every`; attempts at a step that a later one replaced go, too. A crash at any moment leaves
    the newest as it is, and the rest of what was being removed for the next save or prune to sweep.
    A run may save in the directory meanwhile; what it is writing is left alone.

    dry_run: remove nothing, only tell. scan: how the newest is looked at before anything is removed
    (see `find`). directory: a path, or an address as for `save`. storage: in place of what is below
    it.

    Raises:
        ValueError: neither `keep_last` nor `keep_every` is given, or one is less than 1.
        FileNotFoundError: there is no committed checkpoint.
        CheckpointError: the newest is damaged, or time and again gone before it had been looked at;
            nothing was removed.
        OSError: something cannot be removed.
    """
    check_retention(keep_last, keep_every)
    check_scan(scan)
    if keep_last is None and keep_every is None:
        raise ValueError("keep_last and keep_every are both None: say what to keep")
    at = absolute(directory) if storage is None else place(storage.location(""))
    storage = storage or storage_at(at)
    found = _newest_whole(storage, scan)
    names = replaced(storage, found.name, keep_last, keep_every)
    if not dry_run:
        for name in names:
            try:
                remove_checkpoint(storage, name)
            except FileNotFoundError:  # a run's own retention was faster
                continue
        sweep_removed(storage)
    return Pruned(
        newest=at / found.name,
        removed=tuple(at / name for name in names),
    )


def _newest_whole(storage: Storage, scan: Scan) -> StepDirectory:
    """Return the newest checkpoint once it has been looked at."""
    for _ in range(_TRIES):
        found = newest(storage)
        if found is None:
            raise FileNotFoundError(
                f"no committed checkpoint directly below {storage.location('')}"
            )
        try:
            manifest = read_manifest(storage, found.name)
            problems = scan_part(storage, found.name, manifest, scan)
        except CheckpointError:
            if found not in directories(storage):
                continue
            raise
        if found not in directories(storage):  # a run saved meanwhile, and removed this one
            continue
        if problems:
            raise CheckpointError(
                f"{storage.location(found.name)} is damaged, so nothing was removed: {problems[0]}"
            )
        return found
    raise CheckpointError(
        f"{storage.location('')}: a run removes checkpoints sooner than they can be looked at "
        f"(scan {scan})"
    )

"""Finding a checkpoint on one rank for all: two ranks never go on from different ones.

Ranks may see different things in one directory: on a network file system that caches, on local
disks that are not shared, or while a save or its retention runs. So rank 0 alone looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt.agreement import together
from mcore_ckpt.commit import find_below, read_manifest, read_manifest_bytes, resolve
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.names import MANIFEST
from mcore_parallel.collectives import broadcast_object
from mcore_parallel.group import Group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A committed checkpoint: its absolute path, its step, and what it holds besides tensors."""

    path: Path
    step: int
    state: dict[str, Any]


def find(
    directory_or_checkpoint: str | os.PathLike[str], group: Group | None = None
) -> Found | None:
    """Return a checkpoint, or the newest committed one of a directory, the same on every rank.

    None, on every rank: nothing is committed there, or there is no such directory.

    Every rank of `group` (default: this process alone) calls it. Rank 0 alone looks, at the path
    that it passes; the others touch no file and take its answer, over the group's CPU twin. Passing
    the answer's `path` to `load` then makes sure that all of this is of one checkpoint. In a
    directory, a checkpoint whose marker was damaged is passed over with a RuntimeWarning on rank 0.

    Raises:
        FileNotFoundError: on every rank: the path is itself a checkpoint that was never committed.
        ValueError: on every rank: the path is a file.
        CheckpointError: on every rank: the checkpoint is damaged, of a newer format, or cannot be
            read.
    """

    def look() -> Found | None:
        path = Path(directory_or_checkpoint)
        if path.is_file():
            raise ValueError(
                f"{path} is a file; a checkpoint is a directory (nearest: {path.parent})"
            )
        found = find_below(path)
        if found is None:
            return None
        storage, name = found
        manifest = read_manifest(storage, name)
        return Found(
            path=Path(storage.location(name)), step=manifest.step, state=dict(manifest.state)
        )

    what = f"finding a checkpoint at {os.fspath(directory_or_checkpoint)} failed"
    return on_first_rank((group or Group.single()).cpu, what, look)


def open_for_all(
    path: str | os.PathLike[str], group: Group, what: str
) -> tuple[str, str, Manifest]:
    """Choose the checkpoint and read its manifest on rank 0, for all ranks.

    Returns the location of the directory it is in, its name, and the manifest; errors as `load`.
    """

    def look() -> tuple[str, str, bytes]:
        storage, name = resolve(path)
        return storage.location(""), name, read_manifest_bytes(storage, name)

    parent, name, data = on_first_rank(group, what, look)
    return parent, name, Manifest.decode(data, f"{parent}/{name}/{MANIFEST}")


def on_first_rank(group: Group, what: str, look: Callable[[], T]) -> T:
    """Return what `look` returns on the group's rank 0, or raise its error, on every rank.

    FileNotFoundError and ValueError keep their type; anything else becomes CheckpointError.
    """
    answers: list[T] = []

    def run() -> None:
        if group.rank == 0:
            answers.append(look())

    together(group, what, run, passing=(ValueError, FileNotFoundError))
    answer: T | None = answers[0] if answers else None
    return broadcast_object(answer, 0, group)  # type: ignore[return-value]  # rank 0's, a T

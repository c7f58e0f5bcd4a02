"""Finding a checkpoint on one rank for all: two ranks never go on from different ones.

Ranks may see different things in one directory: on a network file system that caches, on local
disks that are not shared, or while a save or its retention runs. So rank 0 alone looks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mcore_ckpt.addresses import Place, place, storage_at
from mcore_ckpt.agreement import together
from mcore_ckpt.commit import find_below, read_manifest_bytes, resolve
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.names import MANIFEST
from mcore_ckpt.scanning import Scan, check_scan, scan_part
from mcore_ckpt.storage import Readable
from mcore_parallel.collectives import broadcast_object
from mcore_parallel.group import Group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A committed checkpoint: its step, and what it holds besides tensors.

    path: absolute, or the address where one was given.
    """

    path: Place
    step: int
    state: dict[str, Any]


def find(
    directory_or_checkpoint: str | os.PathLike[str],
    group: Group | None = None,
    *,
    scan: Scan = "none",
    storage: Readable | None = None,
) -> Found | None:
    """Return a checkpoint, or the newest committed one of a directory, the same on every rank.

    None, on every rank: nothing is committed there, or there is no such directory.

    Every rank of `group` (default: this process alone) calls it. Rank 0 alone looks, at the path
    that it passes; the others take its answer, over the group's CPU twin. Passing the answer's
    `path` to `load` then makes sure that all of this is of one checkpoint. In a directory, a
    checkpoint whose marker was damaged is passed over with a RuntimeWarning on rank 0.

    scan: "quick": all files are there with their sizes. "full": all bytes are compared with their
        checksums. The ranks share the work, at the path of rank 0. In a directory, a damaged
        checkpoint is passed over with a RuntimeWarning on rank 0, for the one before. With "none"
        no rank but 0 touches a file.
    storage: in place of the file system; paths, given and found, are then within it, "" its root.

    Raises:
        FileNotFoundError: on every rank: the path is itself a checkpoint that was never committed.
        ValueError: on every rank: the path is a file.
        CheckpointError: on every rank: the checkpoint is damaged, of a newer format, or cannot be
            read; or all of them are damaged.
    """
    check_scan(scan)
    group = (group or Group.single()).cpu
    what = f"finding a checkpoint at {os.fspath(directory_or_checkpoint)} failed"
    passed_over: list[str] = []
    while True:
        answer = on_first_rank(
            group, what, lambda: _look(directory_or_checkpoint, passed_over, scan, storage)
        )
        if answer is None:
            return None
        found, is_itself, data = answer
        problem = _first_problem(found, data, scan, group, what, given=storage)
        if problem is None:
            return found
        if is_itself:
            raise CheckpointError(f"{what}: {problem}")
        passed_over.append(found.path.name)
        if group.rank == 0:
            warnings.warn(
                f"{found.path} is damaged and passed over: {problem}", RuntimeWarning, stacklevel=2
            )


def _look(
    path: str | os.PathLike[str],
    passed_over: list[str],
    scan: Scan,
    given: Readable | None,
) -> tuple[Found, bool, bytes] | None:
    """Return the checkpoint at the path or the newest below it, which of both, and its manifest."""
    if given is None:
        _check_no_file(path)
    while True:
        located = find_below(path, passed_over, given)
        if located is None:
            if passed_over:
                raise CheckpointError("every checkpoint there is damaged")
            return None
        try:
            data = read_manifest_bytes(located.storage, located.name)
            break
        except CheckpointError as error:
            if scan == "none" or located.is_itself:
                raise
            passed_over.append(located.name)
            warnings.warn(f"passing over {error}", RuntimeWarning, stacklevel=2)
    manifest = Manifest.decode(data, f"{located.place}/{MANIFEST}")
    where = located.place if given is None else Path(located.name)
    answer = Found(path=where, step=manifest.step, state=dict(manifest.state))
    return answer, located.is_itself, b"" if scan == "none" else data


def _check_no_file(path: str | os.PathLike[str]) -> None:
    at = place(path)
    if isinstance(at, Path) and at.is_file():
        raise ValueError(f"{at} is a file; a checkpoint is a directory (nearest: {at.parent})")


def _first_problem(
    found: Found, data: bytes, scan: Scan, group: Group, what: str, *, given: Readable | None
) -> str | None:
    """Return what is wrong with a checkpoint, the same on every rank; None when nothing is."""
    if scan == "none":
        return None
    name = found.path.name

    def mine() -> str | None:
        storage = storage_at(found.path.parent) if given is None else given
        manifest = Manifest.decode(data, f"{found.path}/{MANIFEST}")
        problems = scan_part(storage, name, manifest, scan, rank=group.rank, size=group.size)
        return str(problems[0]) if problems else None

    return next((problem for problem in together(group, what, mine) if problem), None)


def open_for_all(
    path: str | os.PathLike[str], group: Group, what: str, given: Readable | None = None
) -> tuple[str, str, Manifest]:
    """Choose the checkpoint and read its manifest on rank 0, for all ranks.

    Returns the path or address of the directory it is in, its name, and the manifest; errors as
    `load`. given: a storage in place of what is at the path.
    """

    def look() -> tuple[str, str, bytes]:
        located = resolve(path, given)
        data = read_manifest_bytes(located.storage, located.name)
        return str(located.place.parent), located.name, data

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

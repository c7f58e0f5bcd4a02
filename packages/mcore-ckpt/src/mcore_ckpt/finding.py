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

from mcore_ckpt.agreement import together
from mcore_ckpt.commit import find_below, newest, read_manifest_bytes, resolve, resolve_in
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.names import MANIFEST, MARKER
from mcore_ckpt.scanning import Scan, check_scan, scan_part
from mcore_ckpt.storage import LocalStorage, Readable
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
    directory_or_checkpoint: str | os.PathLike[str],
    passed_over: list[str],
    scan: Scan,
    given: Readable | None,
) -> tuple[Found, bool, bytes] | None:
    """Return the checkpoint at the path or the newest below it, which of both, and its manifest."""
    path = Path(directory_or_checkpoint)
    if given is not None:
        return _look_in(given, os.fspath(directory_or_checkpoint), passed_over, scan)
    if path.is_file():
        raise ValueError(f"{path} is a file; a checkpoint is a directory (nearest: {path.parent})")
    while True:
        found = find_below(path, passed_over)
        if found is None:
            if passed_over:
                raise CheckpointError("every checkpoint there is damaged")
            return None
        storage, name = found
        try:
            data = read_manifest_bytes(storage, name)
            break
        except CheckpointError as error:
            if scan == "none" or storage.root != path.absolute():
                raise
            passed_over.append(name)
            warnings.warn(f"passing over {error}", RuntimeWarning, stacklevel=2)
    where = Path(storage.location(name))
    manifest = Manifest.decode(data, f"{where}/{MANIFEST}")
    answer = Found(path=where, step=manifest.step, state=dict(manifest.state))
    return answer, where == path.absolute(), b"" if scan == "none" else data


def _look_in(
    storage: Readable, path: str, passed_over: list[str], scan: Scan
) -> tuple[Found, bool, bytes] | None:
    """As `_look`, in a storage."""
    while True:
        below = None if path else newest(storage, passed_over)
        name = path or (below.name if below else "")
        if not name or MARKER not in storage.entries(name):
            if passed_over:
                raise CheckpointError("every checkpoint there is damaged")
            return None
        try:
            data = read_manifest_bytes(storage, name)
            break
        except CheckpointError as error:
            if scan == "none" or path:
                raise
            passed_over.append(name)
            warnings.warn(f"passing over {error}", RuntimeWarning, stacklevel=2)
    manifest = Manifest.decode(data, storage.location(f"{name}/{MANIFEST}"))
    answer = Found(path=Path(name), step=manifest.step, state=dict(manifest.state))
    return answer, bool(path), b"" if scan == "none" else data


def _first_problem(
    found: Found, data: bytes, scan: Scan, group: Group, what: str, *, given: Readable | None
) -> str | None:
    """Return what is wrong with a checkpoint, the same on every rank; None when nothing is."""
    if scan == "none":
        return None
    storage = LocalStorage(found.path.parent) if given is None else given
    name = found.path.name

    def mine() -> str | None:
        manifest = Manifest.decode(data, f"{found.path}/{MANIFEST}")
        problems = scan_part(storage, name, manifest, scan, rank=group.rank, size=group.size)
        return str(problems[0]) if problems else None

    return next((problem for problem in together(group, what, mine) if problem), None)


def open_for_all(
    path: str | os.PathLike[str], group: Group, what: str, given: Readable | None = None
) -> tuple[str, str, Manifest]:
    """Choose the checkpoint and read its manifest on rank 0, for all ranks.

    Returns the location of the directory it is in, its name, and the manifest; errors as `load`.
    given: a storage in place of the file system.
    """

    def look() -> tuple[str, str, bytes]:
        storage, name = resolve(path) if given is None else resolve_in(given, os.fspath(path))
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

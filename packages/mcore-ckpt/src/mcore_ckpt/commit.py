"""Which checkpoints of a directory exist, and how one comes into being and goes, atomically.

A checkpoint is a directory `step_<number>`. From its first moment it holds the file UNCOMMITTED;
when everything in it is durable, that file is given the manifest's hash and renamed to COMMIT.
Removing starts with the reverse rename, and goes on under another name. So at any moment, also
after a crash, a directory `step_<number>` either has COMMIT and is whole, or has UNCOMMITTED (or
nothing at all) and may be swept; one with neither is not ours and is left alone. See
docs/checkpoint-format.md, "Commit".
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mcore_ckpt.addresses import Place, absolute, place, storage_at
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.manifest import FORMAT, Manifest, sha256
from mcore_ckpt.marks import check_directory, new_mark
from mcore_ckpt.names import MANIFEST, MARKER, UNCOMMITTED
from mcore_ckpt.object_storage import ObjectStorage
from mcore_ckpt.storage import Readable, Storage

_NAME = re.compile(r"step_(\d{8,})(?:\.([1-9]\d*))?")
_REMOVED = ".removed"
_REMOVED_NAME = re.compile(_NAME.pattern + re.escape(_REMOVED))
_LOCK_SUFFIX = ".__lock"


class Status(Enum):
    """What the markers in a step directory say."""

    COMMITTED = "committed"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "marker damaged"
    FOREIGN = "not a checkpoint"


@dataclass(frozen=True, kw_only=True)
class StepDirectory:
    """A directory named like a checkpoint: `attempt` counts the saves of one step over another."""

    name: str
    step: int
    attempt: int
    status: Status

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: newer ones are greater."""
        return (self.step, self.attempt)


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The contents of COMMIT."""

    manifest_bytes: int
    manifest_sha256: str
    version: int = 1

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        document = {
            "format": FORMAT,
            "version": self.version,
            "manifest_bytes": self.manifest_bytes,
            "manifest_sha256": self.manifest_sha256,
        }
        return (json.dumps(document) + "\n").encode()

    @staticmethod
    def decode(data: bytes) -> Marker | None:
        """Return the marker in these bytes, None when they are none."""
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                return None
            return Marker(
                manifest_bytes=int(document["manifest_bytes"]),
                manifest_sha256=str(document["manifest_sha256"]),
                version=int(document["version"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


def step_name(step: int, attempt: int = 0) -> str:
    """Return the directory name of a step's first save, or of a later one over it."""
    return f"step_{step:08d}" + (f".{attempt}" if attempt else "")


def scan(storage: Readable) -> list[StepDirectory]:
    """Return every directory named like a checkpoint, oldest first."""
    found = []
    for name, is_directory in storage.entries("").items():
        match = _NAME.fullmatch(name)
        if match and is_directory:
            found.append(
                StepDirectory(
                    name=name,
                    step=int(match[1]),
                    attempt=int(match[2] or 0),
                    status=_status(storage, name),
                )
            )
    return sorted(found, key=lambda d: d.age)


def _status(storage: Readable, name: str) -> Status:
    try:  # first: in object storage a list costs more than an object
        marker = Marker.decode(storage.get(f"{name}/{MARKER}"))
    except (FileNotFoundError, IsADirectoryError):
        entries = storage.entries(name)
    else:
        return Status.COMMITTED if marker else Status.DAMAGED
    if MARKER in entries or UNCOMMITTED in entries or not entries:  # MARKER: put this moment
        return Status.UNCOMMITTED
    return Status.FOREIGN


def newest(storage: Readable, without: Sequence[str] = ()) -> StepDirectory | None:
    """Return the newest committed checkpoint of a storage, None when there is none.

    One whose marker is damaged is passed over with a RuntimeWarning; those called `without` are
    passed over, too.
    """
    for found in reversed(scan(storage)):
        if found.name in without:
            continue
        if found.status is Status.COMMITTED:
            return found
        if found.status is Status.DAMAGED:
            where = storage.location(f"{found.name}/{MARKER}")
            warnings.warn(
                f"{where} is damaged; passing over that checkpoint", RuntimeWarning, stacklevel=3
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Located:
    """A committed checkpoint: the storage it is in, its name there, and where that is for others.

    is_itself: whether that is what was looked for, and not the newest one below it.
    """

    storage: Readable
    name: str
    place: Place
    is_itself: bool = False


def list_checkpoints(
    directory: str | os.PathLike[str], *, storage: Readable | None = None
) -> list[Place]:
    """Return the committed checkpoints of a directory, oldest first, one for each step.

    directory: a path, or an address as for `save`. storage: in place of what is below it.
    """
    found = scan(storage or storage_at(directory))
    committed = [d for d in found if d.status is Status.COMMITTED]
    by_step: dict[int, Place] = {d.step: place(directory) / d.name for d in committed}
    return list(by_step.values())


def latest(directory: str | os.PathLike[str], *, storage: Readable | None = None) -> Place | None:
    """Return the newest committed checkpoint of a directory, None when there is none.

    What a crash left half-written is never returned. A checkpoint whose marker was damaged later
    is passed over with a RuntimeWarning. directory: a path, or an address as for `save`. storage:
    in place of what is below it.
    """
    found = newest(storage or storage_at(directory))
    return place(directory) / found.name if found else None


def find_below(
    path: str | os.PathLike[str], without: Sequence[str] = (), given: Readable | None = None
) -> Located | None:
    """Return the checkpoint at `path`, or the newest one below it.

    None when nothing is committed there, but for those called `without`, or `path` does not exist.
    given: a storage in place of what is there; `path` is then a name in it, or "" for the newest.

    Raises:
        FileNotFoundError: `path` itself is a checkpoint that was never committed.
    """
    if given is not None:
        return _find_in(given, os.fspath(path), without)
    at = absolute(path)
    storage: Readable = storage_at(at)
    entries = storage.entries("")
    if MARKER in entries:
        return Located(storage=storage_at(at.parent), name=at.name, place=at, is_itself=True)
    if UNCOMMITTED in entries:
        raise FileNotFoundError(f"{at} was never committed: its save did not finish")
    found = newest(storage, without)
    return Located(storage=storage, name=found.name, place=at / found.name) if found else None


def _find_in(storage: Readable, path: str, without: Sequence[str]) -> Located | None:
    name = "" if path == "." else path
    if not name:
        found = newest(storage, without)
        if found is None:
            return None
        name = found.name
    elif MARKER not in storage.entries(name):
        return None
    return Located(
        storage=storage, name=name, place=place(storage.location(name)), is_itself=bool(path)
    )


def resolve(path: str | os.PathLike[str], given: Readable | None = None) -> Located:
    """As `find_below`, where there has to be one.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
    """
    found = find_below(path, given=given)
    if found is None:
        where = absolute(path) if given is None else given.location(os.fspath(path))
        raise FileNotFoundError(f"no committed checkpoint at {where} or directly below it")
    return found


def read_manifest_bytes(storage: Readable, name: str) -> bytes:
    """Return a committed checkpoint's manifest file, checked against the marker.

    Raises:
        CheckpointError: marker or manifest is missing or damaged.
    """
    where = storage.location(name)

    def get(file: str) -> bytes:
        try:
            return storage.get(f"{name}/{file}")
        except (FileNotFoundError, IsADirectoryError):
            raise CheckpointError(f"{where}: {file} is missing") from None

    marker, data = Marker.decode(get(MARKER)), get(MANIFEST)
    if marker is None:
        raise CheckpointError(f"{where}/{MARKER} is damaged")
    if (len(data), sha256(data)) != (marker.manifest_bytes, marker.manifest_sha256):
        raise CheckpointError(
            f"{where}/{MANIFEST} ({len(data)} bytes) is damaged: {MARKER} names another hash "
            f"({marker.manifest_bytes} bytes)"
        )
    return data


def read_manifest(storage: Readable, name: str) -> Manifest:
    """Return a committed checkpoint's manifest; CheckpointError when it is damaged."""
    return Manifest.decode(
        read_manifest_bytes(storage, name), storage.location(f"{name}/{MANIFEST}")
    )


def begin(storage: Storage, step: int, mark: bytes | None = None) -> str:
    """Sweep what crashes left behind, and create the directory for a save of `step`.

    mark: of the save, see `new_mark`.

    Returns its name. A committed checkpoint of the same step stays until the new one is committed:
    the new one then lies beside it, as `step_<number>.<attempt>`.

    Raises:
        ValueError: something that is no checkpoint is in the way, such as a link to one, or
            the directory is itself one.
    """
    check_directory(storage)
    storage.make_directory("")
    try:
        _sweep(storage)
    except OSError as error:  # such as a file that a network file system still holds
        warnings.warn(f"cannot sweep what is left over: {error}", RuntimeWarning, stacklevel=2)
    found = scan(storage)
    committed = [d for d in found if d.status is Status.COMMITTED]
    if committed:  # the only one that the last save can have left lock files in
        _sweep_locks(storage, committed[-1].name)
    taken = [d for d in found if d.step == step]
    for other in taken:
        if other.status is Status.FOREIGN:
            raise ValueError(
                f"{storage.location(other.name)} is in the way and not a checkpoint (it has "
                f"neither {MARKER} nor {UNCOMMITTED}): move it elsewhere"
            )
    name = step_name(step, max(d.attempt for d in taken) + 1 if taken else 0)
    if storage.entries("").get(name) is False:  # through a link, another directory would be written
        raise ValueError(
            f"{storage.location(name)} is in the way and no directory (it is a link, or a file): "
            f"move it elsewhere"
        )
    storage.make_directory(name)
    storage.put(f"{name}/{UNCOMMITTED}", mark or new_mark())
    # Durable before anything else in the directory: whatever a crash leaves here can be swept.
    storage.sync([f"{name}/{UNCOMMITTED}", name, ""])
    return name


def commit(storage: Storage, name: str, manifest: bytes, *, version: int = 1) -> None:
    """Write the manifest and the marker. Everything else in the directory is durable already."""
    storage.put(f"{name}/{MANIFEST}", manifest)
    storage.sync([f"{name}/{MANIFEST}", name])
    marker = Marker(manifest_bytes=len(manifest), manifest_sha256=sha256(manifest), version=version)
    storage.put(f"{name}/{UNCOMMITTED}", marker.encode())
    storage.sync([f"{name}/{UNCOMMITTED}"])
    storage.rename(f"{name}/{UNCOMMITTED}", f"{name}/{MARKER}")
    storage.sync([name])


def retain(
    storage: Storage, name: str, keep_last: int | None, keep_every: int | None = None
) -> list[str]:
    """Remove what the committed checkpoint `name` replaces, oldest first; return the names.

    As `replaced` lists it, but for what somebody else (`prune`) is removing already.
    """
    removed = []
    for old in replaced(storage, name, keep_last, keep_every):
        try:
            remove_checkpoint(storage, old)
        except FileNotFoundError:  # the other one was faster
            continue
        removed.append(old)
    return removed


def replaced(
    storage: Readable, name: str, keep_last: int | None, keep_every: int | None = None
) -> list[str]:
    """Return what the committed checkpoint `name` replaces, oldest first.

    That is an earlier save of the same step, and older steps beyond the newest `keep_last` (this
    one counted) that are no multiples of `keep_every`; with None for both, no other step. Newer
    steps, which a run that was taken back to an earlier step finds, stay.
    """
    found = [d for d in scan(storage) if d.status is Status.COMMITTED]
    new = next((d for d in found if d.name == name), None)
    if new is None:  # a run's retention has just removed it
        return []
    newest_attempts = {d.step: d for d in found}
    older = [d for d in newest_attempts.values() if d.step < new.step]
    kept = older
    if keep_last is not None or keep_every is not None:
        kept = older[max(0, len(older) - ((keep_last or 1) - 1)) :]
        kept += [d for d in older if keep_every and d.step % keep_every == 0]
    return [d.name for d in found if d.age < new.age and d not in kept]


def remove_checkpoint(storage: Storage, name: str) -> None:
    """Remove a checkpoint: it stops being one at once, and a crash leaves something to sweep."""
    if MARKER in storage.entries(name):
        storage.rename(f"{name}/{MARKER}", f"{name}/{UNCOMMITTED}")
        storage.sync([name])
    if isinstance(storage, ObjectStorage):  # it cannot rename a directory: the mark goes last
        for entry, is_directory in storage.entries(name).items():
            if entry != UNCOMMITTED:
                _remove_tree(storage, f"{name}/{entry}", is_directory)
        _remove_tree(storage, name, is_directory=True)
        return
    # The new name says by itself that what is left of the directory may be removed; so the order
    # in which the removals below become durable does not matter, and none waits for the disk.
    storage.rename(name, name + _REMOVED)
    storage.sync([""])
    _remove_tree(storage, name + _REMOVED, is_directory=True)


def sweep_removed(storage: Storage) -> None:
    """Remove what is left of checkpoints whose removal was begun."""
    for name, is_directory in storage.entries("").items():
        if is_directory and _REMOVED_NAME.fullmatch(name):
            _remove_tree(storage, name, is_directory)


def _sweep(storage: Storage) -> None:
    sweep_removed(storage)
    for leftover in scan(storage):
        if leftover.status is Status.UNCOMMITTED:
            remove_checkpoint(storage, leftover.name)


def _remove_tree(storage: Storage, path: str, is_directory: bool) -> None:
    if is_directory:
        for entry, below in storage.entries(path).items():
            _remove_tree(storage, f"{path}/{entry}", below)
        if isinstance(storage, ObjectStorage):
            storage.remove_directory(path)
            return
    storage.remove(path)


def _sweep_locks(storage: Storage, path: str) -> None:
    for entry, is_directory in storage.entries(path).items():
        if is_directory:
            _sweep_locks(storage, f"{path}/{entry}")
        elif entry.endswith(_LOCK_SUFFIX):
            storage.remove(f"{path}/{entry}")

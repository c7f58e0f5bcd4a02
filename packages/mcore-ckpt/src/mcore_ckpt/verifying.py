"""Verifying: does every byte of a checkpoint still say what was written?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from mcore_ckpt.addresses import Place, absolute, place, storage_at
from mcore_ckpt.checksum import crc32
from mcore_ckpt.commit import Located, Status, read_manifest, resolve, scan
from mcore_ckpt.default_engine import DefaultEngine
from mcore_ckpt.engine import Engine, Region
from mcore_ckpt.errors import CheckpointError, NewerFormatError
from mcore_ckpt.manifest import Manifest, TensorInfo, sha256
from mcore_ckpt.memory import check_room
from mcore_ckpt.names import FILES, MARKER
from mcore_ckpt.progress import Advance
from mcore_ckpt.storage import Readable
from mcore_ckpt.threads import map_in_threads
from mcore_parallel.layout import Box

_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong. where: path within the checkpoint. tensor, chunk: if it is one."""

    where: str
    what: str
    tensor: str | None = None
    chunk: tuple[int, ...] | None = None

    def __str__(self) -> str:
        of = f"tensor {self.tensor} chunk {list(self.chunk or ())}: " if self.tensor else ""
        return f"{of}{self.where} {self.what}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was looked at, and the problems found (none: the checkpoint is whole)."""

    path: Place
    num_tensors: int
    num_chunks: int
    num_bytes: int
    problems: tuple[Problem, ...]


def verify(
    path: str | os.PathLike[str],
    *,
    advance: Advance | None = None,
    storage: Readable | None = None,
) -> Verification:
    """Read a whole checkpoint and compare it with its checksums.

    `path` is a checkpoint, or the directory of several: then the newest that has a commit marker,
    even a damaged one. advance: told of the bytes that have been compared, from several threads.
    storage: in place of what is at `path`, which is then within it, and "" its root.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: it is of a newer format, which is no damage.
    """
    return _verify(_locate(path, storage), advance)


def num_bytes_of(path: str | os.PathLike[str]) -> int:
    """Return how many bytes `verify` would compare; 0 where the manifest is damaged.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    located = _locate(path)
    try:
        tensors = read_manifest(located.storage, located.name).tensors.values()
    except CheckpointError:
        return 0
    return sum(info.grid.num_chunks * info.chunk_bytes for info in tensors)


def verify_at(storage: Readable, name: str, *, advance: Advance | None = None) -> Verification:
    """As `verify`, for the checkpoint called `name` in a storage."""
    at = place(storage.location(name))
    return _verify(Located(storage=storage, name=name, place=at), advance)


def _verify(located: Located, advance: Advance | None) -> Verification:
    storage, name, where = located.storage, located.name, located.place
    try:
        manifest = read_manifest(storage, name)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        problem = Problem(where=str(error), what="(nothing else can be checked)")
        return Verification(
            path=where, num_tensors=0, num_chunks=0, num_bytes=0, problems=(problem,)
        )
    engine = DefaultEngine()
    found = map_in_threads(
        lambda chunk: check_chunk(storage, name, *chunk, engine=engine),
        _chunks(manifest),
        _THREADS,
        "mcore-ckpt-verify",
    )
    problems = [problem for problem in found if problem]
    return Verification(
        path=where,
        num_tensors=len(manifest.tensors),
        num_chunks=sum(info.grid.num_chunks for info in manifest.tensors.values()),
        num_bytes=sum(info.num_bytes for info in manifest.tensors.values()),
        problems=(*_check_documents(storage, name, manifest), *problems),
    )


def _chunks(manifest: Manifest) -> Iterator[tuple[str, TensorInfo, int]]:
    for tensor, info in manifest.tensors.items():
        for number in range(info.grid.num_chunks):
            yield tensor, info, number


def _locate(path: str | os.PathLike[str], given: Readable | None = None) -> Located:
    at = absolute(path) if given is None else place(given.location(os.fspath(path)))
    storage = storage_at(at) if given is None else given
    named = given is not None and os.fspath(path) not in ("", ".")
    if named or MARKER in storage.entries(""):
        return resolve(path, given)
    marked = [d for d in scan(storage) if d.status in (Status.COMMITTED, Status.DAMAGED)]
    if not marked:
        return resolve(path, given)
    return Located(storage=storage, name=marked[-1].name, place=at / marked[-1].name)


def _check_documents(storage: Readable, name: str, manifest: Manifest) -> Iterator[Problem]:
    found = (
        *(check_document(storage, name, manifest, path) for path in manifest.documents),
        *(check_file(storage, name, manifest, file) for file in manifest.files),
    )
    return (problem for problem in found if problem)


def check_document(storage: Readable, name: str, manifest: Manifest, path: str) -> Problem | None:
    """Return what is wrong with a zarr document of a checkpoint."""
    data = _get(storage, f"{name}/{path}")
    if data is None:
        return Problem(where=path, what="is missing")
    if crc32(data) != manifest.documents[path]:
        return Problem(where=path, what="is damaged: its checksum is not the manifest's")
    return None


def check_file(storage: Readable, name: str, manifest: Manifest, file: str) -> Problem | None:
    """Return what is wrong with an attached file of a checkpoint."""
    path, info = f"{FILES}/{file}", manifest.files[file]
    data = _get(storage, f"{name}/{path}")
    if data is None:
        return Problem(where=path, what="is missing")
    if (len(data), sha256(data)) != (info.num_bytes, info.sha256):
        return Problem(where=path, what="is damaged: its hash is not the manifest's")
    return None


def check_chunk(
    storage: Readable, name: str, tensor: str, info: TensorInfo, number: int, *, engine: Engine
) -> Problem | None:
    """Return what is wrong with a chunk of a tensor. engine: decodes those that are encoded."""
    where = f"{tensor}/{info.key(number)}"
    if info.is_encoded:
        data = _decoded(storage, f"{name}/{tensor}", info, number, engine)
    else:
        data = _get(storage, f"{name}/{where}")
    if data is None:
        there = info.is_encoded and _get(storage, f"{name}/{where}") is not None
        what = "is damaged: it cannot be decoded" if there else "is missing"
    elif len(data) != info.chunk_bytes:
        what = f"has {len(data)} bytes instead of {info.chunk_bytes}"
    elif crc32(data) != info.crc32[number]:
        what = "is damaged: its checksum is not the manifest's"
    else:
        return None
    return Problem(where=where, what=what, tensor=tensor, chunk=info.grid.coordinates(number))


def _decoded(
    storage: Readable, array: str, info: TensorInfo, number: int, engine: Engine
) -> bytes | None:
    """Return the bytes of a chunk as they were before they were encoded; None when it cannot be."""
    box = Box(info.grid.box(number).start, info.chunk_shape)
    try:
        check_room(info.chunk_bytes, array)
        (found,) = engine.read(storage, [Region(array=array, info=info.padded, box=box)])
    except CheckpointError:
        return None
    return found.tobytes()


def _get(storage: Readable, path: str) -> bytes | None:
    try:
        return storage.get(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None

"""Is a checkpoint whole? A look at it before it is relied on, shared between the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

from mcore_ckpt.default_engine import DefaultEngine
from mcore_ckpt.manifest import Manifest
from mcore_ckpt.names import FILES
from mcore_ckpt.object_storage import ObjectStorage
from mcore_ckpt.storage import Readable
from mcore_ckpt.threads import map_in_threads
from mcore_ckpt.verifying import Problem, check_chunk, check_document, check_file

Scan = Literal["none", "quick", "full"]
SCANS: tuple[Scan, ...] = ("none", "quick", "full")
_THREADS = 16


def check_scan(scan: str) -> None:
    """Raise ValueError when `scan` is none of the three."""
    if scan not in SCANS:
        raise ValueError(f"scan is {scan!r}; it is 'none', 'quick' or 'full'")


def scan_part(
    storage: Readable,
    name: str,
    manifest: Manifest,
    scan: Scan,
    *,
    rank: int = 0,
    size: int = 1,
) -> list[Problem]:
    """Return what is wrong with the part of the checkpoint `name` that is this rank's to look at.

    Every `size`-th thing from number `rank` on. scan: "quick": every file is there and has its size
    (contents that were lost to a crash of the machine, or overwritten, it does not see). "full":
    everything is read and compared with its checksums. "none": nothing.
    """
    if scan == "none":
        return []
    checks = (_quick if scan == "quick" else _full)(storage, name, manifest)
    mine = islice(checks, rank, None, size)
    found = map_in_threads(lambda check: check(), mine, _THREADS, "mcore-ckpt-scan")
    return [problem for problem in found if problem]


Check: TypeAlias = Callable[[], Problem | None]


def _full(storage: Readable, name: str, manifest: Manifest) -> Iterator[Check]:
    engine = DefaultEngine()
    for path in manifest.documents:
        yield partial(check_document, storage, name, manifest, path)
    for file in manifest.files:
        yield partial(check_file, storage, name, manifest, file)
    for tensor, info in manifest.tensors.items():
        for number in range(info.grid.num_chunks):
            yield partial(check_chunk, storage, name, tensor, info, number, engine=engine)


def _quick(storage: Readable, name: str, manifest: Manifest) -> Iterator[Check]:
    for path in manifest.documents:
        yield partial(_present, storage, name, path, None)
    for file, held in manifest.files.items():
        yield partial(_present, storage, name, f"{FILES}/{file}", held.num_bytes)
    for tensor, info in manifest.tensors.items():
        size = None if info.is_encoded else info.chunk_bytes
        for number in range(info.files.num_chunks):
            yield partial(_present, storage, name, f"{tensor}/{info.files.key(number)}", size)


def _present(storage: Readable, name: str, path: str, num_bytes: int | None) -> Problem | None:
    if isinstance(storage, ObjectStorage) and storage.has(f"{name}/{path}", num_bytes):
        return None
    found = _size(storage, f"{name}/{path}")
    if found is None:
        return Problem(where=path, what="is missing")
    if num_bytes is None:
        return None if found else Problem(where=path, what="is empty")
    if found != num_bytes:
        return Problem(where=path, what=f"has {found} bytes instead of {num_bytes}")
    return None


def _size(storage: Readable, path: str) -> int | None:
    if isinstance(storage, ObjectStorage):
        return storage.size(path)
    try:
        return os.stat(storage.location(path)).st_size
    except FileNotFoundError:
        return None

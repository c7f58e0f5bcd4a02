"""Arrays on disk by content hash, built once, safe when many processes build at the same time."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data._files import abandoned, fsync_path, locked_directory

Arrays = dict[str, NDArray[Any]]


def content_key(parameters: Mapping[str, object], *arrays: NDArray[Any]) -> str:
    """Return 32 hex digits that stand for JSON-able `parameters` and the content of `arrays`."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    digest.update(json.dumps(parameters, sort_keys=True).encode())
    return digest.hexdigest()


def cached_arrays(
    directory: Path, key: str, build: Callable[[], Arrays], names: Sequence[str] = ()
) -> Arrays:
    """Return the arrays stored under `directory/key`, mapped; `build` makes them when absent.

    Any number of processes may call this together: one of them builds, the others wait for it, and
    take over when it dies. Arrays are written under a temporary name, synced, and renamed all at
    once: what lies under the final name is always whole. What killed processes left behind is
    removed by the next one that builds. Processes whose `directory` is on a disk of their own
    machine agree machine by machine. `names` are arrays that must be there: who sweeps old files
    out of a folder may leave a part. ValueError when one is damaged or missing.
    """
    final = directory / key
    if not final.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        with _turn(final):
            if not final.is_dir():
                _store(final, build())
    try:
        found = {p.stem: np.load(p, mmap_mode="r") for p in sorted(final.glob("*.npy"))}
        if missing := set(names) - set(found):
            raise ValueError(f"it has no {min(missing)}.npy")
        return found
    except (ValueError, EOFError) as error:
        raise ValueError(f"{final}: damaged cache ({error}); delete it to build it anew") from error


@contextmanager
def _turn(final: Path) -> Iterator[None]:
    """Keep other processes from building the same arrays at the same time.

    It only saves work: should two build after all, one of them is first and both are right. So a
    file system without locks is no error.
    """
    path = _lock_path(final)
    with open(path, "wb") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _store(final: Path, arrays: Arrays) -> None:
    """Write the arrays so that they appear under `final` whole, unless others did already."""
    for path in abandoned(final):
        shutil.rmtree(path, ignore_errors=True)
    with locked_directory(final) as temporary:
        try:
            for name, array in arrays.items():
                with open(temporary / f"{name}.npy", "wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
            fsync_path(temporary)
            # Before, so that no kill leaves it beside what is whole, where nobody would sweep it.
            _lock_path(final).unlink(missing_ok=True)
            temporary.rename(final)
            fsync_path(final.parent)
        except OSError:
            # Another process was faster: its arrays are the same ones.
            if not final.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

"""Arrays on disk by content hash, built once, safe when many processes build at the same time."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
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


def cached_arrays(directory: Path, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays stored under `directory/key`, mapped; `build` makes them when absent.

    They are written under a temporary name, synced, and renamed all at once: any number of
    processes may call this together, and what lies under the final name is always whole. What
    killed processes left behind is removed by the next one that builds.
    """
    final = directory / key
    if not final.is_dir():
        arrays = build()
        directory.mkdir(parents=True, exist_ok=True)
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
                temporary.rename(final)
                fsync_path(directory)
            except OSError:
                # Another process was faster: its arrays are the same ones.
                if not final.is_dir():
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    try:
        return {p.stem: np.load(p, mmap_mode="r") for p in sorted(final.glob("*.npy"))}
    except (ValueError, EOFError) as error:
        raise ValueError(f"{final}: damaged cache ({error}); delete it to build it anew") from error

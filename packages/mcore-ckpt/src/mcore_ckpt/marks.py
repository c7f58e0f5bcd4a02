"""Whose a directory is that is being saved in: one save tells its own from another's by a mark."""

from __future__ import annotations

import contextlib
import uuid

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.names import MARKER, UNCOMMITTED
from mcore_ckpt.storage import Readable


def check_directory(storage: Readable) -> None:
    """Raise ValueError when what checkpoints are to be saved in is a checkpoint itself.

    Whoever looks there would find that one, and never the newer ones inside.
    """
    for mark in (MARKER, UNCOMMITTED):
        with contextlib.suppress(OSError):
            storage.get(mark)
            raise ValueError(
                f"{storage.location('')} is itself a checkpoint (it has {mark}): save to the "
                f"directory above it"
            )


def new_mark() -> bytes:
    """Return what UNCOMMITTED is to hold during one save; no two saves have the same."""
    return f"This checkpoint is being written.\n{uuid.uuid4().hex}\n".encode()


def is_marked(storage: Readable, name: str, mark: bytes) -> bool:
    """Return whether the directory is still that of the save with this mark."""
    try:
        return storage.get(f"{name}/{UNCOMMITTED}") == mark
    except FileNotFoundError:
        return False


def check_mark(storage: Readable, name: str, mark: bytes) -> None:
    """Raise CheckpointError when another save has swept this one's directory, or has its name."""
    if not is_marked(storage, name, mark):
        raise CheckpointError(
            f"another save in the same directory took {storage.location(name)} away: only one may "
            f"run there at a time"
        )

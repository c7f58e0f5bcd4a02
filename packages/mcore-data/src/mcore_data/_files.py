"""Files that appear whole or not at all: temporary names, locks, fsync."""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def fsync_path(path: Path) -> None:
    """Force the file or directory `path` to disk (for a directory: its entries)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    """Take the exclusive lock of an open file if it is free; whether it was."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def temporary_path(final: Path) -> Path:
    """Return a fresh hidden name beside `final` that `abandoned(final)` recognises."""
    return final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")


def create_temporary(final: Path) -> tuple[Path, BinaryIO]:
    """Create and open a temporary file beside `final`; it stays locked while it is open.

    The lock is what tells a file in use from one that a killed process left behind.
    """
    while True:
        path = temporary_path(final)
        file = open(path, "xb")  # noqa: SIM115 - the caller closes it
        # Between creation and lock a sweeper may have taken the file for an abandoned one.
        if _lock(file.fileno()) and os.fstat(file.fileno()).st_nlink > 0:
            return path, file
        file.close()


@contextmanager
def locked_directory(final: Path) -> Iterator[Path]:
    """Create a temporary directory beside `final`, locked for the length of the block."""
    while True:
        path = temporary_path(final)
        path.mkdir()
        # As with files, a sweeper may be faster than the lock.
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(fd) and path.exists():
            break
        os.close(fd)
    try:
        yield path
    finally:
        os.close(fd)


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other processes out of the same block for `directory`; waits for its turn."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def abandoned(final: Path) -> Iterator[Path]:
    """Yield the temporary files or directories of `final` whose process is gone.

    Each is locked only until the next one is asked for: remove it before.
    """
    for path in final.parent.glob(f".{_escape(final.name)}.*.tmp"):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # its owner finished, or another sweeper was faster
            continue
        try:
            if _lock(fd):
                yield path
        finally:
            os.close(fd)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

"""What to do about a disk that refuses, said in the error that tells of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FULL = "free space there, or keep fewer checkpoints, and save again"
_DENIED = "make the directory writable for this user, and save again"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: "the file system is mounted read-only: mount it for writing, or save elsewhere",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ESTALE: "the network file system lost the directory: mount it again",
}
_TEXTS = {  # engines report what the system said as text
    "no space left on device": errno.ENOSPC,
    "disk quota exceeded": errno.EDQUOT,
    "permission denied": errno.EACCES,
    "operation not permitted": errno.EPERM,
    "read-only file system": errno.EROFS,
    "too many open files": errno.EMFILE,
    "stale file handle": errno.ESTALE,
}


def advice(error: OSError) -> str | None:
    """Return what a user can do about an error of the disk; None when nobody can tell."""
    if error.errno in _ADVICE:
        return _ADVICE[error.errno]
    text = str(error).lower()
    return next((_ADVICE[number] for words, number in _TEXTS.items() if words in text), None)


def with_advice(local: Callable[[], T]) -> T:
    """Return what `local` returns; an OSError that it raises says at its end what can be done."""
    try:
        return local()
    except FileNotFoundError:
        raise
    except OSError as error:
        found = advice(error)
        if found is None:
            raise
        raise OSError(f"{error}: {found}") from error

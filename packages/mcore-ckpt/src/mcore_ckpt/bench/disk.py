"""The disk that is measured: its name, and how to make it read again."""

from __future__ import annotations

import os
from pathlib import Path


def name_of(folder: Path, mounts: str | None = None) -> str:
    """Return device, file system type and mount point of a folder, as the system lists them.

    mounts: in place of `/proc/mounts`.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text()
        except OSError:
            return "unknown disk"
    where = folder.resolve()
    best = ("unknown disk", "/", "")
    for line in mounts.splitlines():
        device, point, kind = line.split()[:3]
        point = point.replace("\\040", " ")
        if (where == Path(point) or Path(point) in where.parents) and len(point) >= len(best[1]):
            best = (device, point, kind)
    return f"{best[0]} ({best[2]}) at {best[1]}"


def drop_cache(folder: Path) -> bool:
    """Ask the system to forget what it has in memory of all files below; return whether it could.

    Only of these files, so it needs no privilege; what is not yet on the disk is written first: at
    once, since a sync of each would ask the disk for as many flushes.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True

"""Where a checkpoint's small files live, and when what was written there is durable.

The commit protocol is written against `Storage` alone, so that a test can record every operation
and replay any prefix of it. Chunks go past it through an engine, to `Storage.location`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

_SYNC_THREADS = 16
LARGE = 256 << 10  # bytes: smaller files are better written to the disk many at a time
DIRECT = 4096  # bytes: what goes past the page cache is aligned to it
_SYNC_FILE_RANGE_WRITE = 2


class Readable(Protocol):
    """The reading half of `Storage`."""

    def location(self, path: str) -> str:
        """Return where `path` lies, for engines and messages."""

    def get(self, path: str) -> bytes:
        """Return a file's contents; FileNotFoundError when there is none."""

    def entries(self, path: str) -> dict[str, bool]:
        """Return the names in a directory, true for directories; empty when there is none."""


class Storage(Readable, Protocol):
    """A tree of files; paths are relative to its root, joined by '/', and "" is the root.

    Nothing is durable before `sync`, and each operation may become durable on its own, in any
    order: the contents of a file by syncing the file, its name (new, moved or removed) by syncing
    the directory that holds the name.
    """

    def make_directory(self, path: str) -> None:
        """Create a directory whose parent exists; one that is there already is left alone."""

    def put(self, path: str, data: bytes) -> None:
        """Write a file of these contents in an existing directory, over an older one."""

    def rename(self, old: str, new: str) -> None:
        """Rename a file, over an older one, or a directory, within its directory; atomically."""

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory; what is not there is no error."""

    def sync(self, paths: Iterable[str]) -> None:
        """Make the contents of these files and the names in these directories durable."""


class LocalStorage:
    """Files of a local or shared POSIX file system below `root`, which need not exist yet."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._base = "" if self.root == Path(self.root.anchor) else str(self.root)

    def location(self, path: str) -> str:
        """Return the absolute path."""
        return f"{self._base}/{path}" if path else str(self.root)

    def make_directory(self, path: str) -> None:
        """Create a directory; for the root, also those above it, which are then durable."""
        if path:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.location(path))
            return
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for directory in missing:
            _fsync(str(directory.parent))

    def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        write_file(self.location(path), [data])

    def get(self, path: str) -> bytes:
        """Read a file."""
        with open(self.location(path), "rb") as file:
            return file.read()

    def entries(self, path: str) -> dict[str, bool]:
        """List a directory."""
        try:
            with os.scandir(self.location(path)) as found:
                return {e.name: e.is_dir(follow_symlinks=False) for e in found}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory."""
        os.replace(self.location(old), self.location(new))

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(self.location(path)):
                os.rmdir(self.location(path))
            else:
                os.unlink(self.location(path))

    def sync(self, paths: Iterable[str]) -> None:
        """Call fsync on each, several at a time: a journal then commits many of them at once."""
        locations = [self.location(path) for path in paths]
        if len(locations) < 4:
            _fsync_all(locations)
            return
        # Some at a time for each thread: handing over each alone costs as much as its fsync.
        share = max(1, len(locations) // (8 * _SYNC_THREADS))
        shares = [locations[i : i + share] for i in range(0, len(locations), share)]
        with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="mcore-ckpt-sync") as pool:
            for _ in pool.map(_fsync_all, shares):
                pass


def write_file(
    location: str, blocks: Iterable[bytes | memoryview], *, past_cache: bool = False
) -> None:
    """Write a file of these bytes, over an older one; bare calls: there may be thousands of them.

    A large one is on its way to the disk when this returns, so that a sync has less to wait for.

    past_cache: where the system can, straight from the blocks to the disk, without a copy in the
        page cache. For that a block begins at a multiple of `DIRECT` in memory and is a multiple of
        it in length; what is not goes through the cache, and so does everything after it.
    """
    descriptor, direct = _create(location, past_cache)
    size = 0
    try:
        for block in blocks:
            left = memoryview(block)
            if direct:
                left = left[_write_direct(descriptor, left[: len(left) // DIRECT * DIRECT]) :]
                if left:
                    _through_cache(descriptor)
                    direct = False
            size += len(left)
            while left:
                left = left[os.write(descriptor, left) :]
        if size >= LARGE and (start := _write_back()) is not None:
            start(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)  # a hint: the sync tells of errors
    finally:
        os.close(descriptor)


def _create(location: str, past_cache: bool) -> tuple[int, bool]:
    """Create a file; return its descriptor, and whether what is written goes past the cache."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if past_cache and (direct := getattr(os, "O_DIRECT", 0)):
        try:
            return os.open(location, flags | direct, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # what file systems say that cannot
                raise
    return os.open(location, flags, 0o666), False


def _write_direct(descriptor: int, block: memoryview) -> int:
    """Write to a file past the page cache; return how many bytes that took."""
    done = 0
    while done < len(block) and not done % DIRECT:
        try:
            done += os.write(descriptor, block[done:])
        except OSError as error:
            if error.errno != errno.EINVAL:  # a disk that wants more to be aligned
                raise
            break
    return done


def _through_cache(descriptor: int) -> None:
    """Let what is written to a file from now on go through the page cache."""
    import fcntl  # only there is what goes past it

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)


@functools.cache
def _write_back() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's sync_file_range; None where there is none."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: Callable[[int, int, int, int], int] = function
    return found


def will_read(location: str, start: int, num_bytes: int) -> None:
    """Tell the system that a part of a file is read soon: it begins to, and this returns."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError):  # who reads it meets the error
        descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def read_file(location: str, into: memoryview, *, start: int, size: int) -> None:
    """Fill a buffer with the bytes from `start` on of a file that has to have `size` bytes.

    Raises:
        EOFError: it has more or less.
    """
    descriptor = os.open(location, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise EOFError(f"it has {found} bytes instead of {size}")
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], start + done)
            if not count:  # cut off meanwhile
                raise EOFError(f"it ends at byte {start + done} of {size}")
            done += count
    finally:
        os.close(descriptor)


def _fsync_all(locations: Iterable[str]) -> None:
    for location in locations:
        _fsync(location)


def _fsync(location: str) -> None:
    descriptor = os.open(location, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

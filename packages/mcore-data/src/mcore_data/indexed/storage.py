"""Files in object storage, read in ranges: blocks kept and read ahead, retries, clear errors."""

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_data._files import create_temporary, exclusive, fsync_path

T = TypeVar("T")

_OBSTORE: Final = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")
_THREADS: Final = 4  # requests of one file under way at the same time
_LONGEST_WAIT_S: Final = 10.0
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How files in object storage are read.

    Attributes:
        cache_dir: local folder to keep indices in, shared by any number of processes; None: each
            reader holds its index in memory.
        options: what the library is to know beside the address, such as endpoint, region and keys:
            of obstore for s3, gs, az and http(s), of fsspec for every other scheme.
        block_bytes: size of a request.
        cached_blocks: blocks kept in memory, the last ones used.
        read_ahead: blocks fetched ahead of reads that go on where the one before ended.
        retries: times that a failed request is made again, after `backoff_s` seconds and then twice
            as long each time. What is not there or not allowed fails at once.
        timeout_s: seconds that a request may take, default 60; for s3, gs, az and http(s) only:
            of fsspec's libraries each has `options` of its own for it.

    """

    cache_dir: str | Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    block_bytes: int = 1 << 22
    cached_blocks: int = 16
    read_ahead: int = 2
    retries: int = 5
    backoff_s: float = 0.2
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("block_bytes", 1),
            ("cached_blocks", 1),
            ("read_ahead", 0),
            ("retries", 0),
            ("backoff_s", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is {least}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"timeout_s is {self.timeout_s}, it must be above 0")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object's size in bytes, and a text that changes with its content."""

    size: int
    version: str


class ObjectChangedError(OSError):
    """The object is no longer the one that was opened."""


class ObjectBackend(Protocol):
    """One object, by the library that reads it.

    FileNotFoundError, PermissionError and ObjectChangedError are final; any other OSError may be
    tried again.
    """

    def info(self) -> ObjectInfo:
        """Return what is known of the object without reading it."""
        ...

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes `begin` to `end` - 1, or as many of them as came.

        ObjectChangedError where the library can tell that `info` was of another content.
        """
        ...


def is_url(prefix: str | Path) -> bool:
    """Whether `prefix` is an address such as `s3://bucket/corpus` and no path."""
    return isinstance(prefix, str) and "://" in prefix


class RemoteFile:
    """A file in object storage, read as the readers of local files read theirs.

    Attributes:
        size: bytes.

    Raises:
        OSError: from the constructor and `read`: one line with the address, when the object is not
            there, may not be read, has changed since it was opened (where the store says which
            version it reads, as s3, gs, az and most web servers do), or a request failed more often
            than it is tried again.
        ValueError: the library for the scheme is not installed, or refuses the address or options.

    """

    def __init__(self, url: str, storage: Storage) -> None:
        self.url = url
        self._storage = storage
        self._pid = os.getpid()
        self._backend = _open_backend(url, storage)
        self._info = self._tried("its size", self._backend.info)
        self.size = self._info.size
        self._lock = Lock()
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._next = -1  # the block after those of the last read
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="mcore-data-storage")

    def read(self, dtype: np.dtype[Any], count: int, begin: int) -> NDArray[Any]:
        """Return `count` values from byte `begin` on."""
        if os.getpid() != self._pid:  # the threads stayed behind: it would wait for ever
            raise OSError(f"{self.url}: opened before a fork; start workers by spawn")
        step, end = self._storage.block_bytes, begin + count * dtype.itemsize
        out = bytearray(end - begin)
        kept = self._storage.cached_blocks
        for first in range(begin // step, -(-end // step), kept):
            blocks = range(first, min(first + kept, -(-end // step)))
            for block, future in zip(blocks, self._futures(blocks), strict=True):
                start = block * step
                a, b = max(begin, start), min(end, start + step)
                out[a - begin : b - begin] = future.result()[a - start : b - start]
        array = np.frombuffer(out, dtype)
        array.flags.writeable = False
        return array

    def read_all(self) -> bytes:
        """Return the whole file; nothing of it is kept."""
        step = self._storage.block_bytes
        starts = range(0, self.size, step)
        parts = [self._pool.submit(self._fetch, a, min(a + step, self.size)) for a in starts]
        return b"".join(part.result() for part in parts)

    def cached(self, directory: Path) -> Path:
        """Return a local copy in `directory`, made unless one of the same content is there.

        Of many processes that ask for it at the same time one fetches it, and no other ever sees a
        part of it.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.url}\n{self._info.version}\n{self.size}".encode())
        final = directory / f"{digest.hexdigest()}{Path(self.url).suffix}"
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive(directory):
            if not final.is_file():
                path, file = create_temporary(final)
                try:
                    with file:
                        file.write(self.read_all())
                        file.flush()
                        fsync_path(path)
                    path.replace(final)
                    fsync_path(directory)
                finally:
                    path.unlink(missing_ok=True)
        return final

    def close(self) -> None:
        """Drop what is kept and what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()

    def _futures(self, blocks: range) -> list[Future[bytes]]:
        """Return the blocks that are kept, under way or now asked for."""
        with self._lock:
            onward = blocks.start in (self._next, self._next - 1)
            self._next = blocks.stop
            wanted = [self._future(block) for block in blocks]
            last = -(-self.size // self._storage.block_bytes)
            if onward:
                for block in range(blocks.stop, min(blocks.stop + self._storage.read_ahead, last)):
                    self._future(block)
            while len(self._blocks) > self._storage.cached_blocks + self._storage.read_ahead:
                self._blocks.popitem(last=False)
            return wanted

    def _future(self, block: int) -> Future[bytes]:
        future = self._blocks.get(block)
        if future is None or (future.done() and future.exception() is not None):
            begin = block * self._storage.block_bytes
            end = min(begin + self._storage.block_bytes, self.size)
            future = self._blocks[block] = self._pool.submit(self._fetch, begin, end)
        self._blocks.move_to_end(block)
        return future

    def _fetch(self, begin: int, end: int) -> bytes:
        def whole() -> bytes:
            got = self._backend.read(begin, end)
            if len(got) != end - begin:
                raise OSError(f"{len(got)} of {end - begin} bytes came")
            return got

        return self._tried(f"bytes {begin} to {end}", whole)

    def _tried(self, what: str, ask: Callable[[], T]) -> T:
        wait = self._storage.backoff_s
        for left in range(self._storage.retries, -1, -1):
            try:
                return ask()
            except FileNotFoundError:
                raise FileNotFoundError(f"{self.url}: no such file") from None
            except PermissionError as error:
                raise PermissionError(f"{self.url}: access denied ({_line(error)})") from None
            except ObjectChangedError:
                raise ObjectChangedError(
                    f"{self.url}: {what}: the object has changed since it was opened"
                ) from None
            except OSError as error:
                if not left:
                    times = (
                        f"{self._storage.retries + 1} times" if self._storage.retries else "once"
                    )
                    raise OSError(f"{self.url}: {what}: tried {times}, {_line(error)}") from None
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        raise AssertionError


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _open_backend(url: str, storage: Storage) -> ObjectBackend:
    scheme = url.partition("://")[0]
    library = "obstore" if scheme in _OBSTORE else "fsspec"
    try:
        if library == "obstore":
            from mcore_data.indexed.obstore import ObstoreBackend

            return ObstoreBackend(url, storage.options, storage.timeout_s or _TIMEOUT_S)
        if storage.timeout_s is not None:
            raise ValueError(
                f"{url}: timeout_s={storage.timeout_s} is for obstore: give what the library of "
                f"{scheme} calls its timeout in options"
            )
        from mcore_data.indexed.fsspec import FsspecBackend

        return FsspecBackend(url, storage.options)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise ValueError(f"{url}: fsspec needs {error.name} for it: {error}") from None
        raise ValueError(
            f"{url}: reading it needs {library}: pip install 'mcore-data[storage]'"
        ) from None

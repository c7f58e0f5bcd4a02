"""Checkpoints in object storage: what a bucket can do of what a file system does."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from mcore_ckpt.engine import Engine


class ObjectStorage(ABC):
    """A `Storage` of objects by key: no directories, no rename, and a put is all or nothing.

    What was put is durable, and seen by everybody, when the call returns: today's object stores
    promise both. So a checkpoint begins to exist with the put of its marker, and stops existing
    when that is deleted; see "Object storage" in docs/checkpoint-format.md.
    """

    @abstractmethod
    def engine(self) -> Engine:
        """Return the engine that moves chunks there when none is given."""

    @abstractmethod
    def location(self, path: str) -> str:
        """Return the address of `path`."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Return an object's contents; FileNotFoundError when there is none."""

    @abstractmethod
    def get_part(self, path: str, start: int, stop: int | None = None) -> bytes:
        """Return the bytes from `start` (from the end where negative) up to `stop`."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write an object, over an older one, all at once."""

    @abstractmethod
    def entries(self, path: str) -> dict[str, bool]:
        """Return the names below `path` up to the next '/', true where more follows."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object; what is not there is no error."""

    def remove_directory(self, path: str) -> None:  # noqa: B027
        """Remove the directory that a key's prefix left empty, where there are such."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the bytes of an object, None when there is none."""

    def has(self, path: str, num_bytes: int | None) -> bool:
        """Return whether there is an object of so many bytes (None: of any, but not empty)."""
        size = self.size(path)
        return bool(size) if num_bytes is None else size == num_bytes

    def rename(self, old: str, new: str) -> None:
        """Put the object's contents under the new key, then delete the old one.

        Between the two both are there, and after a crash may stay so.
        """
        self.put(new, self.get(old))
        self.remove(old)

    def make_directory(self, path: str) -> None:  # noqa: B027
        """Do nothing: keys need no directories."""

    def sync(self, paths: Iterable[str]) -> None:  # noqa: B027
        """Do nothing: what was put is durable."""


@contextlib.contextmanager
def telling(storage: ObjectStorage, path: str) -> Iterator[None]:
    """Turn what a library raises, of whatever kind, into an OSError of one line with the address.

    FileNotFoundError and its siblings stay what they are.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or repr(error)
        raise OSError(f"{storage.location(path)}: {text}") from error

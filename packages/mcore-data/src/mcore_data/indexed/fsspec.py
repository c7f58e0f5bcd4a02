"""Objects of any file system that the library `fsspec` knows."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import fsspec  # type: ignore[import-untyped]

from mcore_data.indexed.storage import ObjectInfo

T = TypeVar("T")

_READ_AT: Final = ("atime", "accessTime", "last_access_time", "time")
"""What file systems call the time of the last read, which says nothing of the content."""


class FsspecBackend:
    """One object behind the `ObjectBackend` interface."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url, **options)
        except ModuleNotFoundError:
            raise
        except (ImportError, ValueError, TypeError) as error:
            raise ValueError(f"{url}: {' '.join(str(error).split())}") from None

    def info(self) -> ObjectInfo:
        """Ask for the object's size and whatever else is known of it."""
        self._fs.invalidate_cache()
        info = _translated(lambda: self._fs.info(self._path))
        if info.get("type") == "directory":
            raise FileNotFoundError(self._path)
        # All that is known: each file system has a name of its own for what changes with content.
        marks = sorted(f"{key}={value}" for key, value in info.items() if key not in _READ_AT)
        return ObjectInfo(size=int(info["size"]), version=" ".join(marks))

    def read(self, begin: int, end: int) -> bytes:
        """Ask for a range."""
        return _translated(lambda: bytes(self._fs.cat_file(self._path, start=begin, end=end)))


def _translated(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except OSError:
        raise
    except Exception as error:  # a library for each file system, and each has errors of its own
        raise OSError(f"{type(error).__name__}: {error}") from None

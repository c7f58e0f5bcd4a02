"""Object storage through fsspec: S3, Google, Azure, … or memory. The one module that imports it."""

from __future__ import annotations

import contextlib
from typing import Any

from mcore_ckpt.engine import Engine
from mcore_ckpt.object_storage import ObjectStorage, telling

try:
    import fsspec  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        "storage through fsspec needs it: pip install 'mcore-ckpt[fsspec]'"
    ) from error


class FsspecStorage(ObjectStorage):
    """Objects below an address that fsspec opens: `FsspecStorage("s3://bucket/runs/demo")`.

    options: of the file system, such as credentials or an endpoint; what is not given comes from
    fsspec's own configuration. Chunks go through zarr-python (`ZarrEngine`).
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        self._root = root.rstrip("/")

    def engine(self) -> Engine:
        """Return zarr-python's."""
        from mcore_ckpt.zarr_engine import ZarrEngine

        return ZarrEngine()

    def location(self, path: str) -> str:
        """Return the address with its protocol."""
        return str(self._fs.unstrip_protocol(self._at(path)))

    def get(self, path: str) -> bytes:
        """Return an object's contents."""
        with telling(self, path):
            data: bytes = self._fs.cat_file(self._at(path))
        return data

    def get_part(self, path: str, start: int, stop: int | None = None) -> bytes:
        """Return some bytes of an object."""
        with telling(self, path):
            data: bytes = self._fs.cat_file(self._at(path), start=start, end=stop)
        return data

    def put(self, path: str, data: bytes) -> None:
        """Write an object; in what has directories, make the one that it is in."""
        at = self._at(path)
        with telling(self, path):
            try:
                self._fs.pipe_file(at, data)
            except FileNotFoundError:
                self._fs.makedirs(at.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(at, data)

    def entries(self, path: str) -> dict[str, bool]:
        """List what is below a prefix."""
        at = self._at(path)
        try:
            with telling(self, path):
                found = self._fs.ls(at, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names = ((entry["name"].rstrip("/"), entry["type"]) for entry in found)
        return {name.rpartition("/")[2]: kind == "directory" for name, kind in names if name != at}

    def remove(self, path: str) -> None:
        """Delete an object."""
        with contextlib.suppress(FileNotFoundError), telling(self, path):
            self._fs.rm_file(self._at(path))

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory, on the file systems that fsspec opens, too."""
        with contextlib.suppress(FileNotFoundError), telling(self, path):
            self._fs.rmdir(self._at(path))

    def size(self, path: str) -> int | None:
        """Return the bytes of an object."""
        try:
            with telling(self, path):
                size: int = self._fs.info(self._at(path))["size"]
        except FileNotFoundError:
            return None
        return size

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def protocols() -> list[str]:
    """Return the schemes of the addresses that can be given, installed libraries or not."""
    return sorted(fsspec.available_protocols())

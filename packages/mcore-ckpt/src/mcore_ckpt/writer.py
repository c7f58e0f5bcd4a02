"""Writing files into a checkpoint, with an account of what still has to be synced."""

from __future__ import annotations

from mcore_ckpt.storage import Storage


class Writer:
    """Creates files and directories below a directory that exists, and makes them durable later.

    Whatever is created also marks the directory that holds its name: a file without its name, or a
    directory without its name, would not be there after a crash.
    """

    def __init__(self, storage: Storage, root: str) -> None:
        self._storage = storage
        self._root = root
        self._made = {root}
        self._files: dict[str, None] = {}
        self._directories: dict[str, None] = {}

    def make_directory(self, path: str) -> None:
        """Create the directory at `path` below the root, and those above it."""
        where = f"{self._root}/{path}" if path else self._root
        if where in self._made:
            return
        above, _, _ = path.rpartition("/")
        self.make_directory(above)
        self._storage.make_directory(where)
        self._made.add(where)
        self.wrote_name(path)

    def put(self, path: str, data: bytes) -> None:
        """Write the file at `path` below the root, creating its directory."""
        above, _, _ = path.rpartition("/")
        self.make_directory(above)
        self._storage.put(f"{self._root}/{path}", data)
        self.wrote(path)

    def wrote(self, path: str) -> None:
        """Take note of a file that somebody else writes for this writer."""
        self._files[f"{self._root}/{path}"] = None
        self.wrote_name(path)

    def wrote_name(self, path: str) -> None:
        """Take note of a new name."""
        above, _, _ = path.rpartition("/")
        self._directories[f"{self._root}/{above}" if above else self._root] = None

    def sync(self) -> None:
        """Make everything durable that was written since the last time."""
        self._storage.sync(self._files)
        self._storage.sync(self._directories)
        self._files.clear()
        self._directories.clear()

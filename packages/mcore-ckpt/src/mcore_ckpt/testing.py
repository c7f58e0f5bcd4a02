"""For tests of durability: record what a save does to the disk, and crash it at any moment.

`RecordingStorage` is a `LocalStorage` that logs its operations. `crashes` replays every prefix of
the log on a model of a file system in which only what was synced is sure to survive, and yields
what may be found after a crash there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcore_ckpt.storage import LocalStorage

Tree = dict[str, bytes | None]
Survival = Literal["drop", "keep", "torn"] | int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One change of a tree of files, or one sync of a file or directory."""

    kind: Literal["make_directory", "put", "rename", "remove", "sync"]
    path: str
    data: bytes = b""
    target: str = ""


class RecordingStorage(LocalStorage):
    """A local storage that logs what is done through it in `log`.

    What an engine writes past it appears in the log when it is synced: as files put one after the
    other, all before the first of them is synced.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.log: list[Operation] = []
        self._known: set[str] = set()

    def make_directory(self, path: str) -> None:
        """Create a directory."""
        super().make_directory(path)
        if path:
            self.log.append(Operation(kind="make_directory", path=path))

    def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        super().put(path, data)
        self._known.add(path)
        self.log.append(Operation(kind="put", path=path, data=data))

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory."""
        super().rename(old, new)
        self.log.append(Operation(kind="rename", path=old, target=new))

    def remove(self, path: str) -> None:
        """Remove a file or directory."""
        super().remove(path)
        self._known.discard(path)
        self.log.append(Operation(kind="remove", path=path))

    def sync(self, paths: Iterable[str]) -> None:
        """Sync files and directories."""
        paths = list(paths)
        super().sync(paths)
        for path in paths:
            where = Path(self.location(path))
            if where.is_file() and path not in self._known:
                self._known.add(path)
                self.log.append(Operation(kind="put", path=path, data=where.read_bytes()))
        self.log += (Operation(kind="sync", path=path) for path in paths)


def crashes(
    log: Sequence[Operation], survivals: Sequence[Survival]
) -> Iterator[tuple[int, Survival, Tree]]:
    """Yield (operations done, survival, tree found afterwards) for a crash after each prefix.

    A tree maps paths to contents, directories to None. A survival says what becomes of what was not
    synced: "drop": nothing of it is there. "keep": all is. "torn": all names are there, and the
    contents of files are zeros. A number seeds a random choice for each name and each file (lost,
    kept, zeros, half).
    """
    model = _FileSystem()
    for done in range(len(log) + 1):
        if done:
            model.apply(log[done - 1])
        for survival in survivals:
            yield done, survival, model.crash(survival)


def write_tree(tree: Mapping[str, bytes | None], root: Path) -> None:
    """Create the directories and files of a tree below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for path, data in tree.items():  # directories come before what is in them
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


class TreeStorage:
    """A tree as a storage that can only be read."""

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        self.tree = tree
        self._entries: dict[str, dict[str, bool]] = {"": {}}
        for path, data in tree.items():
            above, _, name = path.rpartition("/")
            self._entries.setdefault(above, {})[name] = data is None

    def location(self, path: str) -> str:
        """Return the path itself."""
        return path

    def get(self, path: str) -> bytes:
        """Return a file's contents."""
        data = self.tree.get(path)
        if data is None:
            raise FileNotFoundError(2, "no such file", path)
        return data

    def entries(self, path: str) -> dict[str, bool]:
        """Return the names in a directory."""
        return self._entries.get(path, {})


@dataclass(eq=False)
class _File:
    """`durable`: what is sure to be found, None before the first sync."""

    current: bytes
    durable: bytes | None = None

    def after_crash(self, survival: Survival, chance: random.Random) -> bytes:
        if self.current == self.durable:
            return self.current
        zeros = bytes(len(self.current))
        if survival == "drop":
            return self.durable or b""
        if survival == "keep":
            return self.current
        if survival == "torn":
            return zeros
        half = self.current[: len(self.current) // 2]
        return chance.choice([self.durable or b"", self.current, zeros, half])


@dataclass(eq=False)
class _Directory:
    """`pending`: changes since the last sync; each is one or more names that change together."""

    durable: dict[str, _File | _Directory] = field(default_factory=dict)
    pending: list[dict[str, _File | _Directory | None]] = field(default_factory=list)

    @property
    def current(self) -> dict[str, _File | _Directory]:
        return self._with(self.pending)

    def sync(self) -> None:
        self.durable = self.current
        self.pending = []

    def after_crash(
        self, survival: Survival, chance: random.Random
    ) -> dict[str, _File | _Directory]:
        if survival == "drop":
            return self.durable
        if isinstance(survival, int):
            return self._with([change for change in self.pending if chance.random() < 0.5])
        return self.current

    def _with(
        self, changes: Iterable[Mapping[str, _File | _Directory | None]]
    ) -> dict[str, _File | _Directory]:
        entries = dict(self.durable)
        for change in changes:
            for name, node in change.items():
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        return entries


class _FileSystem:
    """Files and directories as nodes, so that a name that is used again is another node."""

    def __init__(self) -> None:
        self.root = _Directory()

    def apply(self, operation: Operation) -> None:
        above, name = self._place(operation.path)
        if operation.kind == "sync":
            node = above.current[name] if name else self.root
            if isinstance(node, _File):
                node.durable = node.current
            else:
                node.sync()
        elif operation.kind == "put":
            there = above.current.get(name)
            if isinstance(there, _File):
                there.current = operation.data
            else:
                above.pending.append({name: _File(operation.data)})
        elif operation.kind == "make_directory":
            if name not in above.current:
                above.pending.append({name: _Directory()})
        elif operation.kind == "remove":
            above.pending.append({name: None})
        else:
            parent, new = self._place(operation.target)
            assert parent is above
            above.pending.append({name: None, new: above.current[name]})

    def crash(self, survival: Survival) -> Tree:
        chance = random.Random(survival)
        tree: Tree = {}

        def walk(directory: _Directory, path: str) -> None:
            for name, node in sorted(directory.after_crash(survival, chance).items()):
                if isinstance(node, _File):
                    tree[path + name] = node.after_crash(survival, chance)
                else:
                    tree[path + name] = None
                    walk(node, f"{path}{name}/")

        walk(self.root, "")
        return tree

    def _place(self, path: str) -> tuple[_Directory, str]:
        *above, name = path.split("/")
        directory = self.root
        for part in above:
            node = directory.current[part]
            assert isinstance(node, _Directory)
            directory = node
        return directory, name

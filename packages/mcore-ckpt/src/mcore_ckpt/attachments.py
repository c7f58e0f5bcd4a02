"""Files that are kept beside the tensors of a checkpoint, such as the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mcore_ckpt.names import check_path


def collect_files(files: Mapping[str, Path | bytes]) -> dict[str, bytes]:
    """Return the contents of the files to attach, by their path below `files/`.

    A path to a directory stands for all files below it.

    Raises:
        ValueError: a name that cannot be stored, or two files of one name.
        FileNotFoundError: a path that does not exist.
    """
    contents: dict[str, bytes] = {}

    def add(name: str, data: bytes) -> None:
        check_path(name, "file name")
        if name in contents:
            raise ValueError(f"two attached files are called {name!r}")
        parts = name.split("/")
        above = {"/".join(parts[:i]) for i in range(1, len(parts))} & contents.keys()
        below = {other for other in contents if other.startswith(f"{name}/")}
        for one, other in [*((at, name) for at in above), *((name, at) for at in below)]:
            raise ValueError(f"{one!r} is an attached file, and a directory in {other!r}")
        contents[name] = data

    for name, source in files.items():
        if isinstance(source, bytes):
            add(name, source)
        elif source.is_dir():
            for path in sorted(p for p in source.rglob("*") if p.is_file()):
                add(f"{name}/{path.relative_to(source).as_posix()}", path.read_bytes())
        else:
            add(name, source.read_bytes())
    return contents

"""What a global tensor, a prefix and an attached file may be called in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable

MANIFEST = "manifest.json"
MARKER = "COMMIT"
UNCOMMITTED = "UNCOMMITTED"
FILES = "files"
DOCUMENT = "zarr.json"

_COMPONENT = re.compile(r"[A-Za-z0-9_.+@-]+")
_PATH = re.compile(r"[A-Za-z0-9_.+@-]+(?:/[A-Za-z0-9_.+@-]+)*")
_DOTS = re.compile(r"(?:^|/)\.+(?:/|$)")


def check_paths(paths: Iterable[str], what: str) -> None:
    """Raise ValueError for a path that could lead out of the checkpoint; quick, for thousands."""
    for path in paths:
        if not _PATH.fullmatch(path) or _DOTS.search(path):
            raise ValueError(f"{what} {path!r} is no path within a checkpoint")


def check_path(path: str, what: str) -> None:
    """Raise ValueError when `path` is not a sequence of plain names joined by '/'."""
    for part in path.split("/"):
        if not _COMPONENT.fullmatch(part) or not part.strip("."):
            raise ValueError(
                f"{what} {path!r}: each part between slashes must be made of letters, digits and "
                f"._+@- and not of dots alone, which {part!r} is not"
            )
        if part == DOCUMENT or part.startswith("__"):
            raise ValueError(f"{what} {path!r}: {part!r} is a name reserved by zarr")


def check_tensor_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name that cannot be an array of the checkpoint's zarr group.

    A name is `prefix/name`; no name may be a prefix of another one.
    """
    known = set(names)
    for name in known:
        check_path(name, "tensor name")
        prefix, slash, _ = name.partition("/")
        if not slash:
            raise ValueError(f"tensor name {name!r} has no prefix: nearest valid is 'model/{name}'")
        if prefix in (FILES, MANIFEST, MARKER, UNCOMMITTED):
            raise ValueError(f"tensor name {name!r}: the prefix {prefix!r} is reserved")
        for group in groups_of(name):
            if group in known:
                raise ValueError(f"{group!r} is a tensor and a prefix of the tensor {name!r}")


def groups_of(name: str) -> list[str]:
    """Return the groups above an array, outermost first: `a/b/c` lies in `a` and `a/b`."""
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]

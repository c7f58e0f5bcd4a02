"""Where checkpoints are: a path, or an address in object storage; and from there to a storage."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from mcore_ckpt.storage import LocalStorage, Storage

_FORM = re.compile(r"(?:(fsspec|tensorstore)\+)?([A-Za-z][A-Za-z0-9.-]*)://(.*)", re.DOTALL)
_LOST_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)(.*)", re.DOTALL)
_TENSORSTORE = ("s3", "gs")
"""Schemes that go through tensorstore, which is always there; others go through fsspec."""


class Address(str):
    """An address in object storage, such as `s3://bucket/runs/demo`: text that is used as a path.

    It has of `Path` what both can have: `name`, `parent` and `/`.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.partition("://")[2].rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The address without that; of a bucket, itself."""
        above, slash, _ = self.rpartition("/")
        return self if not slash or above.endswith(("/", ":")) else Address(above)

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.rstrip('/')}/{name}" if not self.endswith("://") else self + name)


Place: TypeAlias = Path | Address
"""Where a checkpoint, or a directory of them, is."""


def place(path: str | os.PathLike[str]) -> Place:
    """Return a path or an address from its text. `file:///x` is the path `/x`.

    Raises:
        ValueError: an address of another form than `scheme://…`.
    """
    if isinstance(path, Address):
        return path
    text = os.fspath(path)
    if "://" not in text:
        lost = _LOST_SLASH.fullmatch(text)
        if lost and lost[1].rpartition("+")[2] in _schemes():
            raise ValueError(f"{text} has lost a slash: nearest valid is {lost[1]}://{lost[2]}")
        return Path(path)
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"{text} is no address: nearest valid is s3://{text.rpartition('://')[2]}")
    library, scheme, rest = form.groups()
    if scheme == "file" and library is None:
        if not rest.startswith("/"):
            raise ValueError(f"{text} names no path: nearest valid is file:///{rest}")
        return Path(unquote(rest))
    return Address(text.rstrip("/") if rest.strip("/") else text)


def absolute(path: str | os.PathLike[str]) -> Place:
    """Return `place`, paths from the root of the file system on."""
    at = place(path)
    return at.absolute() if isinstance(at, Path) else at


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path; ValueError for an address, where only a directory will do."""
    at = place(path)
    if isinstance(at, Address):
        raise ValueError(
            f"{at} is an address: give a directory (only runs and `native` checkpoints "
            f"can be in object storage)"
        )
    return at


def check_shared(path: str | os.PathLike[str], num_ranks: int) -> None:
    """Raise ValueError when several ranks cannot see one another's objects at an address."""
    at = place(path)
    form = _FORM.fullmatch(at) if isinstance(at, Address) else None
    if num_ranks > 1 and form is not None and form[2] == "memory":
        raise ValueError(
            f"{at} is in the memory of each of {num_ranks} ranks for itself: give an address that "
            f"all see, such as s3://{form[3]}, or 1 rank"
        )


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of what is below a path or an address. Nothing is read or made there.

    `s3://` and `gs://` go through tensorstore; `memory://` (of this process) and whatever else
    fsspec opens go through that, with the extra `fsspec`. `tensorstore+s3://…` and
    `fsspec+s3://…` say which; so `fsspec+file:///x` and `tensorstore+file:///x` are objects in
    files, where `file:///x` is a directory, as a path is.

    Raises:
        ValueError: the scheme is unknown, the library that it takes is not installed, or refuses
            the rest of the address; one line.
    """
    at = place(path)
    if isinstance(at, Path):
        return LocalStorage(at)
    form = _FORM.fullmatch(at)
    assert form is not None
    library, scheme, rest = form.groups()
    url = f"{scheme}://{rest}"
    if library == "tensorstore" or (library is None and scheme in _TENSORSTORE):
        from mcore_ckpt.kv_storage import KvStorage

        open_it = KvStorage
    else:
        _check_scheme(at, scheme)
        from mcore_ckpt.fsspec_storage import FsspecStorage

        open_it = FsspecStorage  # type: ignore[assignment]
    try:
        return open_it(url)
    except Exception as error:  # each library, and each of its parts, has kinds of its own
        raise ValueError(f"{at} cannot be opened: {' '.join(str(error).split())}") from error


def _check_scheme(at: Address, scheme: str) -> None:
    """Raise ValueError when fsspec is not there, or does not know a scheme."""
    known = _schemes()
    try:
        import mcore_ckpt.fsspec_storage  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{at}: {scheme}:// goes through fsspec, which is not installed: pip install "
            f"'mcore-ckpt[fsspec]' (without it there are {', '.join(f'{s}://' for s in known)})"
        ) from error
    if scheme not in known:
        near = difflib.get_close_matches(scheme.lower(), known, n=1, cutoff=0)[0]
        raise ValueError(f"{at}: unknown scheme {scheme}://, nearest valid is {near}://")


def _schemes() -> list[str]:
    """Return the schemes that can be opened here, those first that need nothing more."""
    try:
        from mcore_ckpt.fsspec_storage import protocols
    except ImportError:
        return ["file", *_TENSORSTORE]
    return ["file", *_TENSORSTORE, *protocols()]

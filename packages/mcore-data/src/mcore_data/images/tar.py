"""Where the members of a tar file lie. Nothing is ever unpacked."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_BLOCK: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Member:
    """A plain file in an archive: its bytes begin at `offset`."""

    name: str
    offset: int
    size: int


def tar_members(path: Path) -> Iterator[Member]:
    """Yield the plain files of an archive that is not compressed, in their order.

    ValueError, with the byte where it stands, for a member whose name leads out of the archive,
    that is a link or a device, or that goes on after the end of the file; and for anything but
    zeros after the last member.
    """
    end = path.stat().st_size
    place = 0
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                place = info.offset
                if info.isdir():
                    continue
                what = f"{path}: member {info.name!r} at byte {place}"
                if PurePosixPath(info.name).is_absolute() or ".." in PurePosixPath(info.name).parts:
                    raise ValueError(f"{what} leads out of the archive")
                if not info.isreg() or info.sparse is not None:
                    raise ValueError(f"{what} is no plain file")
                if info.offset_data + info.size > end:
                    raise ValueError(
                        f"{what} is truncated: it ends at byte {info.offset_data + info.size}, the "
                        f"file has {end}"
                    )
                yield Member(name=info.name, offset=info.offset_data, size=info.size)
            _check_rest(path, archive.offset)
    except tarfile.TarError as error:
        raise ValueError(
            f"{path}: no tar file, a compressed or a damaged one (after byte {place}: {error})"
        ) from None


def _check_rest(path: Path, begin: int) -> None:
    """Refuse what stands where the library saw the end: it takes a damaged header for one."""
    with open(path, "rb") as file:
        file.seek(begin)
        while block := file.read(_BLOCK):
            if rest := block.lstrip(b"\0"):
                place = begin + len(block) - len(rest)
                raise ValueError(
                    f"{path}: damaged, or several archives in one: no member begins at byte "
                    f"{begin}, and byte {place} is not 0"
                )
            begin += len(block)

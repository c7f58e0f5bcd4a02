"""Real text that every machine has: the standard library's sources of the running interpreter."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

VALIDATION_SHARE = 0.02
_SKIP = {"site-packages", "dist-packages", "__pycache__"}


def source_files(root: Path | None = None) -> list[Path]:
    """Return the `.py` files below `root` (default: the standard library), in a stable order.

    Files that are empty or not UTF-8 (some of the library's own test data) are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    files = (p for p in root.rglob("*.py") if not _SKIP & set(p.relative_to(root).parts))
    return sorted(path for path in files if _is_text(path))


def split_files(files: list[Path], root: Path | None = None) -> tuple[list[Path], list[Path]]:
    """Divide documents into training and validation by a hash of their relative path.

    A document is in one of the two as a whole, and in the same one on every machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    train: list[Path] = []
    validation: list[Path] = []
    for path in files:
        value = zlib.crc32(str(path.relative_to(root)).encode()) / 2**32
        (validation if value < VALIDATION_SHARE else train).append(path)
    return train, validation


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode().strip())
    except (UnicodeDecodeError, OSError):
        return False

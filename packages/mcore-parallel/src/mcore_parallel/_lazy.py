"""Packages whose public names are imported when the first of them is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def public_names(package: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` (PEP 562) that finds names in `<package>._public`.

    `package` itself then imports nothing: its submodules that need no torch, and so the command
    line, start without it. Submodules are found, too, once they have been imported.
    """

    def find(name: str) -> Any:
        if name.startswith("_") and name != "__all__":  # a private submodule is on its way
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        public = importlib.import_module(f"{package}._public")
        here = vars(sys.modules[package])
        if name in here:
            return here[name]
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(public, name)

    return find

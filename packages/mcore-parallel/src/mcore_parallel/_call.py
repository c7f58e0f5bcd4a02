"""Calls that are sent to another process, and the warning filters that go with them."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """A top-level function by module, file and name, and its pickled arguments.

    pytest imports a test file under a name that no other process can import; the file is sent along
    so that a worker can load it under the same name.
    """

    module: str
    file: str | None
    name: str
    arguments: bytes

    @staticmethod
    def of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Describe `fn(*args, **kwargs)`; ValueError when another process could not find `fn`."""
        module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", repr(fn))
        if module is None or "<" in name or "." in name:
            raise ValueError(
                f"{name} cannot be sent to a rank: pass a function at the top level of its module"
            )
        file = getattr(sys.modules.get(module), "__file__", None)
        return Call(module=module, file=file, name=name, arguments=pickle.dumps((args, kwargs)))

    def __call__(self) -> Any:
        """Load the function and call it here."""
        # The module first: the arguments may be instances of its classes.
        fn = getattr(_load(self.module, self.file), self.name)
        args, kwargs = pickle.loads(self.arguments)
        return fn(*args, **kwargs)


def _load(name: str, file: str | None) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and (file is None or spec.origin == file):
        return importlib.import_module(name)
    if file is None:
        raise ValueError(f"module {name} cannot be imported by a rank and has no file")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _provide_parents(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _provide_parents(name: str) -> None:
    # Unpickling an instance of a class in "tests.x" imports "tests", which may be no real package.
    parts = name.split(".")
    for parent in (".".join(parts[:i]) for i in range(1, len(parts))):
        if parent in sys.modules:
            continue
        try:
            importlib.import_module(parent)
        except ImportError:
            sys.modules[parent] = ModuleType(parent)


Filter = tuple[str, str, type[Warning], str, int]


def warning_filters() -> list[Filter]:
    """Return the warning filters in force, in a form that can be pickled."""

    def text(pattern: Any) -> str:
        return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""

    return [
        (action, text(message), category, text(module), line)
        for action, message, category, module, line in warnings.filters
        if isinstance(category, type)
    ]


def use_warning_filters(filters: list[Filter]) -> None:
    """Put `filters` in force in place of the present ones."""
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(
            action,  # type: ignore[arg-type]
            message=message,
            category=category,
            module=module,
            lineno=line,
            append=True,
        )

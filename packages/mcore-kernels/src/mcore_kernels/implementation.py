"""The values of the registry: an operator is a table of implementations with what each needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_kernels.requirements import Requirement
from mcore_kernels.target import Target


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        op: the operator's name, such as "rms_norm".
        name: the implementation's name, such as "triton"; "reference" is the specification.
        fn: the callable (or the object with the operator's methods), or its import path
            "module:attribute", imported when it is chosen.
        requires: static requirements; each returns None or the reason for a refusal.
        limits: dynamic requirement: called with the operator's arguments, returns None or the
            reason why these arguments cannot be served.
        second: name of the implementation that serves arguments which `limits` refuses. None:
            such arguments are a ValueError.
        priority: where several can run, the highest is chosen; the reference has 0, and what is
            chosen by name only has less.
        summary: half a line for people.
    """

    op: str
    name: str
    fn: Any
    requires: tuple[Requirement, ...] = ()
    limits: Callable[..., str | None] | None = None
    second: str | None = None
    priority: int = 0
    summary: str = ""

    def refusal(self, target: Target) -> str | None:
        """None when it can run on the target, else every reason why not, in one line."""
        reasons = [reason for check in self.requires if (reason := check(target)) is not None]
        return "; ".join(reasons) if reasons else None

    def load(self) -> Any:
        """The operator itself; imports its module where `fn` is an import path."""
        return load_attribute(self.fn) if isinstance(self.fn, str) else self.fn


@dataclass(frozen=True)
class Operator:
    """An operator: its name and its implementations, of which one is called "reference"."""

    name: str
    implementations: tuple[Implementation, ...]

    def __post_init__(self) -> None:
        names = [one.name for one in self.implementations]
        assert names.count("reference") == 1, names
        assert len(set(names)) == len(names), names
        assert all(one.op == self.name for one in self.implementations), self.name

    def get(self, name: str) -> Implementation | None:
        """The implementation called `name`, or None."""
        return next((one for one in self.implementations if one.name == name), None)

    def ranked(self) -> list[Implementation]:
        """The implementations, highest priority first."""
        return sorted(self.implementations, key=lambda one: -one.priority)


def load_attribute(path: str) -> Any:
    """The object at the import path "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)

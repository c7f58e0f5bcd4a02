"""Choosing an implementation, once, with a reason."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mcore_kernels.implementation import Implementation, Operator, load_attribute
from mcore_kernels.ops import OPERATORS
from mcore_kernels.target import Target


class Resolved:
    """An implementation bound to its operator: call it like the operator itself.

    Nothing is looked up per call. Methods and attributes of the implementation (such as
    `weight_grad` of linear) are reached through it. It prints as what it is, and copying or
    unpickling it chooses the implementation of the same name again.
    """

    op: str
    name: str
    target: Target
    reason: str

    def __init__(
        self, implementation: Implementation, target: Target, *, choice: str, reason: str
    ) -> None:
        """Load `implementation`; `choice` is the name that finds it again."""
        self.op = implementation.op
        self.name = implementation.name
        self.target = target
        self.reason = reason
        self._choice = choice
        self._fn = implementation.load()
        self._call = _with_limits(implementation, self._fn, target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the wrapper itself lacks. Private names are never delegated, so
        # that copying and unpickling, which ask before __init__ has run, cannot recurse.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fn, name)

    def __repr__(self) -> str:
        return f"<{self.op}: {self.name} ({self.reason})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.op, self._choice, self.target, self.reason)


def resolve(op: str, *, target: Target, require: str | None = None) -> Resolved:
    """Choose the implementation of `op` for `target`.

    Args:
        op: name of the operator, such as "rms_norm".
        target: where it will run.
        require: None for the one of highest priority that can run; the name of one; or the import
            path "module:attribute" of an `Implementation` of your own.

    Raises:
        ValueError: no such operator or implementation (the nearest valid name is given), or the
            required one cannot run on the target (the reason and those that can are given).
    """
    operator = operator_named(op)
    if require is None:
        return _best(operator, target)
    implementation = implementation_named(operator, require)
    reason = implementation.refusal(target)
    if reason is not None:
        able = ", ".join(one.name for one in operator.ranked() if one.refusal(target) is None)
        raise ValueError(
            f"{op}: {require!r} cannot run on {target.describe()}: {reason}; available: {able}"
        )
    return Resolved(implementation, target, choice=require, reason="required by name")


def _best(operator: Operator, target: Target) -> Resolved:
    passed: list[str] = []
    for one in operator.ranked():
        reason = one.refusal(target)
        if reason is None:
            because = f"fastest that can run on {target.describe()}"
            if passed:
                because += f", not {'; not '.join(passed)}"
            return Resolved(one, target, choice=one.name, reason=because)
        passed.append(f"{one.name}: {reason}")
    raise AssertionError(f"{operator.name}: the reference refused {target}: {passed}")


def _again(op: str, choice: str, target: Target, reason: str) -> Resolved:
    resolved = resolve(op, target=target, require=choice)
    resolved.reason = reason
    return resolved


def _with_limits(
    implementation: Implementation, fn: Callable[..., Any], target: Target
) -> Callable[..., Any]:
    """`fn`, guarded by the implementation's dynamic requirement where it has one."""
    limits = implementation.limits
    if limits is None:
        return fn
    second = None
    if implementation.second is not None:
        second = resolve(implementation.op, target=target, require=implementation.second)._call
    label = f"{implementation.op}: {implementation.name!r}"

    def guarded(*args: Any, **kwargs: Any) -> Any:
        reason = limits(*args, **kwargs)
        if reason is None:
            return fn(*args, **kwargs)
        if second is None:
            raise ValueError(f"{label} cannot serve this call: {reason}")
        return second(*args, **kwargs)

    return guarded


def operator_named(name: str) -> Operator:
    """The operator called `name`; ValueError naming the nearest one when there is none."""
    if name not in OPERATORS:
        raise ValueError(f"no operator {name!r}; {nearest(name, OPERATORS)}")
    return OPERATORS[name]


def implementation_named(operator: Operator, name: str) -> Implementation:
    """The implementation called `name`, or found at the import path `name`.

    Raises:
        ValueError: there is none; the message gives the nearest name.
    """
    if ":" in name:
        try:
            found = load_attribute(name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{operator.name}: cannot import {name!r}: {error}") from error
        if not isinstance(found, Implementation) or found.op != operator.name:
            raise ValueError(f"{operator.name}: {name!r} is no Implementation of {operator.name}")
        return found
    implementation = operator.get(name)
    if implementation is None:
        names = [one.name for one in operator.implementations]
        raise ValueError(f"{operator.name}: no implementation {name!r}; {nearest(name, names)}")
    return implementation


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message: the likeliest meant name, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of an explanation: an implementation and what becomes of it on a target.

    `status` is "chosen", "available" (it could be required by name) or "refused".
    """

    op: str
    name: str
    status: str
    reason: str
    priority: int
    summary: str


def explain(target: Target) -> list[Row]:
    """Every implementation of every operator, highest priority first, and why it would (not) run.

    Nothing is imported or compiled for it.
    """
    rows: list[Row] = []
    for operator in OPERATORS.values():
        chosen: str | None = None
        for one in operator.ranked():
            refusal = one.refusal(target)
            if refusal is not None:
                status, reason = "refused", refusal
            elif chosen is None:
                chosen = one.name
                status, reason = "chosen", "highest priority of those that can run"
            else:
                status, reason = "available", f"{chosen} has a higher priority"
            if one.second is not None and refusal is None:
                reason += f"; {one.second} serves the arguments that it cannot"
            rows.append(
                Row(
                    op=operator.name,
                    name=one.name,
                    status=status,
                    reason=reason,
                    priority=one.priority,
                    summary=one.summary,
                )
            )
    return rows

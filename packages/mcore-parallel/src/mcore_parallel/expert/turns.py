"""Several computations in turn: while messages of one are under way, another goes on.

A computation is a generator that yields where it would otherwise wait. Run in turn, each goes on
up to its next yield while what the others have started travels. Autograd follows backwards: the
operations of all of them are in one order, so that their backward passes take turns as well.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["Steps", "finish", "in_turns"]

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A computation that yields where something of it is under way, and returns its result."""


def finish(steps: Steps[T]) -> T:
    """Run a computation to its end and return its result."""
    return in_turns([steps])[0]


def in_turns(parts: Sequence[Steps[T]]) -> list[T]:
    """Run computations in turn, each up to its next yield, and return their results in order.

    Those of all ranks yield at the same places, so that their messages meet.
    """
    results: dict[int, T] = {}
    while len(results) < len(parts):
        for index, part in enumerate(parts):
            if index not in results:
                try:
                    next(part)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(parts))]

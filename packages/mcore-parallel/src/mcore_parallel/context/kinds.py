"""The ways to attend over a sequence that is shared out, as text and checked by arithmetic.

Needs no torch: `ParallelConfig` and the command line read it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["ContextKind", "check_context_attention", "check_heads", "parse_kinds"]

_NAMES = ("ring", "all-gather", "all-to-all", "two-level")


@dataclass(frozen=True)
class ContextKind:
    """One way to attend over the ranks of a context-parallel group.

    name: "ring", "all-gather", "all-to-all" or "two-level": all-to-all within parts of `inner`
    neighbouring ranks, a ring over the parts. inner None: the least divisor of the ranks above 1,
    which asks the least of the number of heads.

    Raises:
        ValueError: an unknown name, or inner ranks of a kind that has none.
    """

    name: str
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            close = difflib.get_close_matches(self.name, _NAMES, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"context attention {self.name!r}: {hint}known are {', '.join(_NAMES)}"
            )
        if self.inner is not None and self.name != "two-level":
            raise ValueError(
                f"context attention {self.name!r} has no inner ranks, got {self.inner}: "
                f"use two-level:{self.inner}"
            )

    @staticmethod
    def parse(text: str) -> ContextKind:
        """Return the kind that a text names: "ring", …, "two-level" or "two-level:4"."""
        name, colon, inner = text.partition(":")
        if colon and not inner.isdecimal():
            raise ValueError(f"context attention {text!r} is not of the form 'two-level:2'")
        return ContextKind(name, int(inner) if colon else None)

    def __str__(self) -> str:
        return self.name if self.inner is None else f"{self.name}:{self.inner}"

    def exchanging(self, size: int) -> int:
        """How many neighbours of `size` ranks deal out their heads among them; 1: nobody does.

        Raises:
            ValueError: `inner` does not divide `size`; names the divisors.
        """
        if self.name == "all-to-all":
            return size
        if self.name != "two-level" or size == 1:
            return 1
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        if self.inner is None:
            return divisors[1]
        if self.inner not in divisors:
            raise ValueError(
                f"context attention '{self}' over cp={size} ranks: "
                f"inner must be one of {', '.join(map(str, divisors))}"
            )
        return self.inner


def parse_kinds(text: str) -> tuple[ContextKind, ...]:
    """Return the kinds that a text lists, which the layers of a model use in turn.

    Joined by "+", each perhaps with a number of layers: "ring", "all-gather*5+two-level:4".

    Raises:
        ValueError: names what cannot be read.
    """
    kinds: list[ContextKind] = []
    for item in text.split("+"):
        kind, star, count = item.partition("*")
        if star and not (count.isdecimal() and int(count)):
            raise ValueError(f"context attention {item!r} is not of the form '{kind}*2'")
        kinds += [ContextKind.parse(kind)] * (int(count) if star else 1)
    return tuple(kinds)


def check_context_attention(
    kind: str | ContextKind, size: int, *, num_heads: int, num_kv_heads: int
) -> None:
    """Check, without any process, that `size` ranks can use a kind with so many heads.

    num_heads, num_kv_heads: of one tensor-parallel rank.

    Raises:
        ValueError: one line with the nearest values that fit.
    """
    kind = ContextKind.parse(kind) if isinstance(kind, str) else kind
    check_heads(num_heads, num_kv_heads, kind.exchanging(size))


def check_heads(num_heads: int, num_kv_heads: int, size: int, *, what: str | None = None) -> None:
    """Check that `size` ranks can share the heads, as all-to-all attention does.

    num_heads, num_kv_heads: of one tensor-parallel rank. what: the beginning of the message, for
    other layers that deal out heads, and groups that several heads read.

    Raises:
        ValueError: names the nearest sizes that can: `size` has to divide the query heads, and to
            divide the kv heads or be divided by them (then a kv head goes to several ranks).
    """

    def fits(n: int) -> bool:
        shared = num_kv_heads % n == 0 or n % num_kv_heads == 0
        return num_heads % n == 0 and shared

    if size < 1 or not fits(size):
        valid = [n for n in range(1, num_heads + 1) if fits(n)]
        below = [n for n in valid if n < size][-1:]
        above = [n for n in valid if n > size][:1]
        near = " or ".join(map(str, below + above))
        what = what or f"all-to-all attention: {num_heads} query and {num_kv_heads} kv heads"
        raise ValueError(f"{what} cannot be dealt out over {size} ranks: use {near}")

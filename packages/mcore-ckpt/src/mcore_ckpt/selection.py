"""Which tensors of a checkpoint take part, and what they are called here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Tensors by name: those that begin with a prefix or match a pattern; all where both are None.

    patterns: as in a shell: `*` for anything, also dots and slashes, `?`, `[0-3]`.
    """

    prefixes: Sequence[str] | None = None
    patterns: Sequence[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self.prefixes is None and self.patterns is None:
            return True
        text = str(name)
        return text.startswith(tuple(self.prefixes or ())) or any(
            fnmatchcase(text, pattern) for pattern in self.patterns or ()
        )

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the names that are selected, in their order.

        Raises:
            ValueError: a pattern selects none of them, or none begins with any of the prefixes.
        """
        names = list(names)
        for pattern in self.patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"no tensor is called {pattern!r}; there is {_some(names)}")
        selected = [name for name in names if name in self]
        if self.prefixes and names and not selected:
            prefixes = " or ".join(map(repr, self.prefixes))
            raise ValueError(f"no tensor begins with {prefixes}; there is {_some(names)}")
        return selected


def renamed(names: Iterable[str], rules: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return what tensors are called after the rules: new name → old name.

    rules: (pattern, replacement): a regular expression and what takes the place of a name that it
        matches as a whole, with `{1}`, `{2}`, … for its groups, or `{name}` for named ones. The
        first that matches counts, and a name that matches none stays.

    Raises:
        ValueError: a pattern is no regular expression or matches nothing, a replacement does not
            fit its pattern, or two tensors come to the same name.
    """
    compiled = []
    for pattern, replacement in rules:
        try:
            compiled.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ValueError(f"rename {pattern!r} is no regular expression: {error}") from None
    unused = {pattern for pattern, _ in rules}
    result: dict[str, str] = {}
    names = list(names)
    for name in names:
        new = name
        for rule, replacement in compiled:
            if match := rule.fullmatch(name):
                unused.discard(rule.pattern)
                try:
                    new = replacement.format(name, *match.groups(""), **match.groupdict(""))
                except (LookupError, ValueError, TypeError, AttributeError):
                    raise ValueError(
                        f"rename {rule.pattern!r} has no group for what {replacement!r} names"
                    ) from None
                break
        if new in result:
            raise ValueError(f"{result[new]} and {name} would both be called {new}")
        result[new] = name
    if unused:
        raise ValueError(f"rename {min(unused)!r} matches no tensor; there is {_some(names)}")
    return result


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none at all") + more

"""Patterns of tensor names: `layers.{layer}.attention.{part:q|k|v|o}.weight`.

A placeholder stands for one or more characters that are no dots, or, with choices after a colon,
for one of these. Choices that one pattern of an operator states hold in its other patterns too. At
most one placeholder stands in each part between dots, so that a name matches in one way only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

Values = dict[str, str]
Choices = tuple[tuple[str, str], ...]

_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^{}]*))?\}")


def placeholders(pattern: str) -> list[str]:
    """Return the names of a pattern's placeholders, in order.

    Raises:
        ValueError: braces that are no placeholder, or two placeholders in one part of the name.
    """
    found = []
    for part in pattern.split("."):
        here = [match[1] for match in _PLACEHOLDER.finditer(part)]
        if len(here) > 1 or "{" in _PLACEHOLDER.sub("", part) or "}" in _PLACEHOLDER.sub("", part):
            raise ValueError(
                f"pattern {pattern!r}: {part!r} must have at most one placeholder such as {{layer}}"
            )
        found += here
    if len(set(found)) < len(found):
        raise ValueError(f"pattern {pattern!r} has a placeholder twice")
    return found


def choices(patterns: Iterable[str]) -> Choices:
    """Return the choices that some patterns state, `(placeholder, "q|k|v")`, sorted.

    Raises:
        ValueError: two patterns state different ones for a placeholder.
    """
    stated: dict[str, str] = {}
    for pattern in patterns:
        for name, options in _PLACEHOLDER.findall(pattern):
            if options and stated.setdefault(name, options) != options:
                raise ValueError(
                    f"pattern {pattern!r}: {{{name}}} is one of {stated[name]} elsewhere"
                )
    return tuple(sorted(stated.items()))


def fill(pattern: str, values: Mapping[str, str]) -> str:
    """Return the name that a pattern makes with these values."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], pattern)


@lru_cache(maxsize=1024)
def _compiled(pattern: str, stated: Choices) -> re.Pattern[str]:
    options = dict(stated)
    text, end = "", 0
    for match in _PLACEHOLDER.finditer(pattern):
        allowed = options.get(match[1])
        one_of = "|".join(map(re.escape, allowed.split("|"))) if allowed else "[^.]+"
        text += re.escape(pattern[end : match.start()]) + f"(?P<{match[1]}>{one_of})"
        end = match.end()
    return re.compile(text + re.escape(pattern[end:]))


def find(pattern: str, names: Iterable[str], stated: Choices) -> Iterator[Values]:
    """Yield the values of the placeholders for every name that matches."""
    matcher = _compiled(pattern, stated)
    for name in names:
        if match := matcher.fullmatch(name):
            yield match.groupdict()


def find_groups(
    patterns: Sequence[str], names: Iterable[str], stated: Choices
) -> list[tuple[Values, list[str]]]:
    """Return the values, and the names they make, for which all patterns are there.

    The patterns have the same placeholders.

    Raises:
        ValueError: one of the names is there and another is not; names both.
    """
    names = dict.fromkeys(names)
    found: dict[tuple[tuple[str, str], ...], Values] = {}
    for pattern in patterns:
        for values in find(pattern, names, stated):
            found.setdefault(tuple(sorted(values.items())), values)
    groups = []
    for values in found.values():
        group = [fill(pattern, values) for pattern in patterns]
        for name in group:
            if name not in names:
                present = next(other for other in group if other in names)
                raise ValueError(f"{name} is missing, which belongs with {present}")
        groups.append((values, group))
    return groups

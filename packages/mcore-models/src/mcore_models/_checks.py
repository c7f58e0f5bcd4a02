"""Checks that the configurations share: one line, with the numbers and the nearest valid values."""

import difflib
from collections.abc import Sequence


def check_positive(name: str, value: object) -> None:
    """Require a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Require one of some words; the error names the most similar one."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{name}={value!r} is none of {', '.join(choices)}: did you mean {close!r}?"
        )


def nearest_multiples(value: int, of: int) -> str:
    """The multiples of `of` around `value`, as text for an error: `8 or 12`."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def nearest_divisors(of: int, value: int) -> str:
    """The divisors of `of` around `value`, as text for an error: `4 or 8`."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d >= value][:1]
    return " or ".join(str(d) for d in dict.fromkeys(below + above))

"""The pattern of layers: which mixer and which feed-forward each of them has."""

from collections.abc import Sequence

NO_PART = "."
"""The letter of a pattern entry that says: this layer has no mixer (or no feed-forward)."""

_FEED_FORWARDS = "-E"
_SIGNS = {
    "|": "where a pipeline stage ends is no matter of the architecture: leave it out, and give the "
    "layers of each stage to the layout, stages=…",
    "/": "heads that predict further tokens are no layers of the pattern: leave it out",
}


def parse_pattern(pattern: str | Sequence[str | Sequence[str]], layers: int) -> tuple[str, ...]:
    """The two letters of every layer, from any of the ways to write them (see `ModelConfig`).

    Raises:
        ValueError: an entry is none, or there are not as many as `layers`.
    """
    entries = pattern.split() if isinstance(pattern, str) else pattern
    parsed = tuple("".join(entry) for entry in entries)
    # Two letters are one layer, unless it is a string for two.
    if len(parsed) == 1 and (len(parsed[0]) != 2 or (parsed[0] == pattern and layers == 2)):
        parsed = _single_letters(parsed[0])
    for index, entry in enumerate(parsed):
        if len(entry) != 2 or entry == NO_PART * 2 or any(c.isspace() for c in entry):
            raise ValueError(
                f"pattern entry {index} is {entry!r}: a layer is two letters, mixer and "
                f"feed-forward, such as '*-'; '{NO_PART}' stands for one that is absent"
            )
    if len(parsed) != layers:
        raise ValueError(
            f"pattern has {len(parsed)} entries for num_layers={layers}: "
            f"give {layers} entries or num_layers={len(parsed)}"
        )
    return parsed


def _single_letters(letters: str) -> tuple[str, ...]:
    """The layers of a string with one letter for each, a mixer or a feed-forward alone."""
    for sign, reason in _SIGNS.items():
        if sign in letters:
            raise ValueError(f"pattern {letters!r} has {sign!r}: {reason}")
    return tuple(NO_PART + x if x in _FEED_FORWARDS else x + NO_PART for x in letters)

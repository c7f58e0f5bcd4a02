"""Sizes as people write them."""

from __future__ import annotations

import re


def parse_size(text: str, option: str) -> int:
    """Return the bytes of `5GB`, `200MB`, `4GiB` or a bare number.

    Raises:
        ValueError: it is none of these; names the option.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{option} {text!r} is no size: write it as 5GB, 200MB or 4GiB")
    number, unit, binary = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    scale: int = (1024 if binary else 1000) ** power
    return int(number) * scale

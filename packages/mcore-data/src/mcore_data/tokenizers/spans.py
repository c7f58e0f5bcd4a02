"""From bytes of UTF-8 to characters."""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from mcore_data.tokenizers.base import Spans


def byte_spans(text: str, sizes: Iterable[int]) -> Spans:
    """Return the characters that consecutive tokens of `sizes` bytes stand for.

    A token that begins or ends within a character has all of it.
    """
    ends = np.cumsum([0, *sizes]).tolist()
    if text.isascii():
        return list(pairwise(ends))
    raw = np.frombuffer(text.encode(), np.uint8)
    starts = (raw & 0xC0) != 0x80
    # The character of each byte; one more for the end.
    character = [*(np.cumsum(starts) - 1).tolist(), len(text)]
    return [
        (character[a], character[b - 1] + 1 if b > a else character[a]) for a, b in pairwise(ends)
    ]

"""Log-probabilities in the two shapes of this interface.

Natural logarithms of the model's own probabilities, before temperature and cut-offs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_data import Tokenizer
from mcore_inference.text import BROKEN, continuation

Top = Sequence[tuple[int, float]]

_LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class TokenNames:
    """The text of single tokens: what each adds to a text, leading blanks included.

    A token without text of its own (an end token, some bytes of a character) is `token_id:N`, so
    that no two look alike.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Alone, many tokenizers would cut a token's leading blank.
        self._before = tokenizer.encode("a")
        self._names: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Return the name of `token`."""
        name = self._names.get(token)
        if name is None:
            name = self._text(token) or f"token_id:{token}"
            self._names[token] = name
        return name

    def bytes(self, token: int) -> list[int] | None:
        """Return the bytes of its text, None where it has none of its own."""
        text = self._text(token)
        return list(text.encode()) if text else None

    def _text(self, token: int) -> str:
        text = continuation(self.tokenizer, self._before, [token])
        return "" if BROKEN in text else text


def completion_logprobs(
    names: TokenNames,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[Top | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return `logprobs` of a text completion; the token itself is always among its `top_logprobs`.

    Args:
        names: of tokens.
        tokens: those to report.
        logprobs: of each, None where nothing is known.
        tops: the most probable tokens at each place, None where nothing is known.
        offsets: where each token begins in the text.
    """
    shown: list[dict[str, float] | None] = []
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
        if top is None or logprob is None:
            shown.append(None)
            continue
        entries: dict[str, float] = {}
        for other, value in top:
            entries.setdefault(names(other), _finite(value))  # of equal texts the most probable
        shown.append(entries | {names(token): _finite(logprob)})
    return {
        "tokens": [names(token) for token in tokens],
        "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
        "top_logprobs": shown,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
) -> dict[str, Any]:
    """Return `logprobs` of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names(token), "logprob": _finite(logprob), "bytes": names.bytes(token)}

    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*pair) for pair in top]}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)

"""Text while its tokens come in."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_data import Tokenizer

BROKEN = "\ufffd"
"""What a tokenizer makes of bytes that are no UTF-8, or not yet."""

_CONTEXT = 8  # tokens decoded again before new ones, so that the new ones read as they do in place
_PENDING = 32  # tokens without settled text, after which the older ones are settled all the same
_LONGEST = 4  # bytes, and so at most tokens, of one character


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what the text of prompt and tokens has more than that of the prompt.

    Not the tokens decoded alone, where a piece at the seam may read otherwise: leading blanks, the
    bytes of one character. A character that the prompt leaves incomplete belongs to the
    continuation.
    """
    more = _more(tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens]))
    return tokenizer.decode(tokens) if more is None else more


def without_cut_character(text: str) -> str:
    """Return `text` without what may be the beginning of a character that its end cuts off."""
    return text[: len(text) - _held(text)]


class TextStream:
    """The text that tokens add to a prompt's, piece by piece, up to a stop string.

    At the end it is `without_cut_character(continuation(…))` up to the first stop string. Before
    that, `visible` characters of it are certain: neither part of a character of which bytes are
    missing, nor of what may become a stop string.

    Args:
        tokenizer: decodes the tokens.
        prompt: the tokens before them.
        stop: strings that end the text and do not belong to it.

    Attributes:
        visible: how many characters of the text are certain; all of them after `close`.
        stopped: whether a stop string ended the text. More tokens then change nothing.
        ends: for each token, the length of the text that it and those before it complete (in what
            came before a stop string was searched for).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._context = list(prompt[-_CONTEXT:])
        self._before = tokenizer.decode(self._context)
        self._pending: list[int] = []
        self._settled = ""
        self._tail = ""  # of the pending tokens, which later ones may change
        self._searched = 0
        self.visible = 0
        self.stopped = False
        self.ends: list[int] = []

    @property
    def text(self) -> str:
        """The certain part of the text."""
        return self.since(0)

    def since(self, start: int) -> str:
        """The certain part of the text from character `start` on."""
        return (self._settled + self._tail)[start : self.visible]

    def append(self, token: int) -> None:
        """Take the next token."""
        if self.stopped:
            return
        self._pending.append(token)
        self._tail = self._text_of(self._context, self._before, self._pending)
        held = _held(self._tail)
        if self._tail and not held:
            self._settled += self._tail
            self._tail = ""
            self._move(len(self._pending))
        elif len(self._pending) >= _PENDING:
            self._settle_older()
        safe = len(self._settled) + len(self._tail) - held
        self.ends.append(safe)
        self.visible = safe if not self._stop else self._search(safe)

    def close(self) -> None:
        """Say that no token follows: what was held back for a stop string is text after all."""
        if not self.stopped:
            self.visible = len(self._settled) + len(without_cut_character(self._tail))

    def _search(self, safe: int) -> int:
        """Look for stop strings in the first `safe` characters; return how many are certain."""
        text = (self._settled + self._tail)[:safe]
        start = max(0, self._searched - max(map(len, self._stop)) + 1)
        self._searched = safe
        places = [place for stop in self._stop if (place := text.find(stop, start)) >= 0]
        if places:
            self.stopped = True
            return min(places)
        return safe - max(_overlap(text, stop) for stop in self._stop)

    def _settle_older(self) -> None:
        """Keep the window small where text never settles: broken bytes, tokens without text."""
        moved = len(self._pending) - _LONGEST
        context = [*self._context, *self._pending[:moved]][-_CONTEXT:]
        before = self._tokenizer.decode(context)
        tail = self._text_of(context, before, self._pending[moved:])
        if tail == self._tail:
            del self._pending[:moved]  # they have no text
        elif self._tail.endswith(tail):
            self._settled += self._tail[: len(self._tail) - len(tail)]
            self._tail = tail
            self._move(moved)

    def _move(self, count: int) -> None:
        """Make the first pending tokens part of the context."""
        self._context = [*self._context, *self._pending[:count]][-_CONTEXT:]
        del self._pending[:count]
        self._before = self._tokenizer.decode(self._context)

    def _text_of(self, context: list[int], before: str, tokens: list[int]) -> str:
        more = _more(before, self._tokenizer.decode([*context, *tokens]))
        return self._tokenizer.decode(tokens) if more is None else more


def _more(before: str, after: str) -> str | None:
    for start in (before, before.rstrip(BROKEN)):
        if after.startswith(start):
            return after[len(start) :]
    return None


def _held(text: str) -> int:
    """How many characters at the end may be the beginning of one that is not complete."""
    return min(len(text) - len(text.rstrip(BROKEN)), _LONGEST - 1)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, not all of it, that `text` ends with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0

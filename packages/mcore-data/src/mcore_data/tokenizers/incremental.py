"""Text while its tokens come in."""

import codecs
from collections.abc import Callable, Iterable
from typing import Final, Protocol

_BROKEN: Final = "\ufffd"
_CONTEXT: Final = 8  # tokens decoded again before new ones, so that these read as in their place
_PENDING: Final = 32  # tokens without settled text, after which the older ones are settled anyway
_LONGEST: Final = 4  # bytes, and so at most tokens, of one character


class Decoder(Protocol):
    """Decodes ids one by one: all the texts that it returns, joined, are that of all the ids."""

    def push(self, token: int) -> str:
        """Take the next id; return the text that is certain now and was not before.

        ValueError for an id outside the vocabulary.
        """
        ...

    def finish(self) -> str:
        """Say that no id follows; return the text held back, such as a character cut off."""
        ...


class BytesDecoder:
    """For tokens that stand for bytes, whatever comes before and after them."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take the next id."""
        return self._utf8.decode(self._token_bytes(token))

    def finish(self) -> str:
        """Return what an incomplete character leaves."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any tokenizer: decodes the last few ids with each new one.

    Time per id does not grow with the text.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._before = ""  # the text of the context alone
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Take the next id."""
        self._pending.append(token)
        try:
            text = self._added()
        except ValueError:
            self._pending.pop()
            raise
        if text and not text.endswith(_BROKEN):
            self._settle(len(self._pending))
            return text
        return self._older(text) if len(self._pending) >= _PENDING else ""

    def finish(self) -> str:
        """Return the text of the ids that were held back."""
        text = self._added() if self._pending else ""
        self._settle(len(self._pending))
        return text

    def _added(self) -> str:
        """Return the text that the pending ids add to the context's."""
        whole = self._decode([*self._context, *self._pending])
        for before in (self._before, self._before.rstrip(_BROKEN)):
            if whole.startswith(before):
                return whole[len(before) :]
        return self._decode(self._pending)

    def _older(self, text: str) -> str:
        """Settle all but the last ids, where text never ends whole: broken bytes, or no text."""
        count = len(self._pending) - _LONGEST
        context, before, pending = self._context, self._before, self._pending
        self._settle(count)
        rest = self._added()
        if text.endswith(rest):
            return text[: len(text) - len(rest)]
        self._context, self._before, self._pending = context, before, pending
        return ""

    def _settle(self, count: int) -> None:
        self._context = [*self._context, *self._pending[:count]][-_CONTEXT:]
        self._pending = self._pending[count:]
        self._before = self._decode(self._context)

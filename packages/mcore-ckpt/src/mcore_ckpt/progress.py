"""A line on the terminal that says how far a long command is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

Advance = Callable[[int], None]
"""Called with the number of bytes that have been dealt with since the last call."""

_EVERY = 0.2  # seconds between two drawings


class ProgressLine:
    """A bar with share, rate and time left, drawn over itself while the context lasts.

    Nothing is drawn where the stream is no terminal: logs and pipes stay clean. The line is wiped
    at the end. It may be advanced from several threads.

    Args:
        what: what is done, in one word.
        total: bytes in all.
    """

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = max(total, 1)
        self._stream = stream or sys.stderr
        self._drawn = self._stream.isatty()
        self._clock = clock
        self._start = self._last = clock()
        self._done = 0

    def __call__(self, num_bytes: int) -> None:
        """Go on by some bytes."""
        self._done += num_bytes
        now = self._clock()
        if self._drawn and now - self._last >= _EVERY:
            self._last = now
            self._stream.write("\r" + self.text(now))
            self._stream.flush()

    def text(self, now: float) -> str:
        """Return the line."""
        share = min(self._done / self._total, 1.0)
        bar = "#" * round(30 * share)
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{self._what} [{bar:<30}] {share:4.0%}  {rate / 1e6:.0f} MB/s  "
            f"{max(left, 0.0):.0f} s left  "
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

"""Being asked to stop, by Ctrl-C or by SIGTERM: in both cases what is under way ends in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal asked for the end. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """While the context lasts, SIGTERM raises `Stopped` in the main thread, as Ctrl-C would.

    Nothing is changed in another thread, or where whoever started the process, or a program around
    this, does something else with the signal.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

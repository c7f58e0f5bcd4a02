"""A signal ends the run after the step in flight."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from mcore_train.callbacks.base import Callback

if TYPE_CHECKING:
    from mcore_train.trainer import Trainer


class StopOnSignal(Callback):
    """On SIGTERM or Ctrl-C to any rank, all ranks finish the step, save and return normally.

    A second Ctrl-C does not wait.

    The request travels with the metrics that the ranks reduce anyway (`Trainer.stop_requested`).
    Installed in the main thread only: elsewhere Python delivers no signals.
    """

    def __init__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.asked: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Install the handler."""

        def request(signum: int, frame: FrameType | None) -> None:
            # A terminal sends Ctrl-C to every process, and a launcher passes it on once more:
            # two at once are one.
            now = time.monotonic()
            first, self.asked = self.asked, now if self.asked is None else self.asked
            if signum == signal.SIGINT and first is not None and now - first > 1:
                raise KeyboardInterrupt
            trainer.stop_requested = True

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.previous[number] = signal.signal(number, request)

    def close(self) -> None:
        """Put the former handlers back."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous.clear()

"""A signal ends the run after the step in flight."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from mcore_train.callbacks.base import Callback

if TYPE_CHECKING:
    from mcore_train.trainer import Trainer


class StopOnSignal(Callback):
    """On SIGTERM to any rank, all ranks finish the step, save and return normally.

    The request travels with the metrics that the ranks reduce anyway (`Trainer.stop_requested`).
    Installed in the main thread only: elsewhere Python delivers no signals.
    """

    def __init__(self) -> None:
        self.previous: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Install the handler."""

        def request(signum: int, frame: FrameType | None) -> None:
            trainer.stop_requested = True

        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGTERM, request)

    def close(self) -> None:
        """Put the former handler back."""
        if self.previous is not None:
            signal.signal(signal.SIGTERM, self.previous)
            self.previous = None

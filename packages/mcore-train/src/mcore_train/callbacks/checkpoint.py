"""Saving while training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_train.callbacks.base import Callback
from mcore_train.config import CheckpointConfig

if TYPE_CHECKING:
    from mcore_train.trainer import Trainer


class SaveCheckpoints(Callback):
    """Save every `interval` steps and at the end of the run (also when a signal ends it)."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self.saved_step: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Remember the step that was loaded: it need not be saved again."""
        if trainer.resumed:
            self.saved_step = trainer.step

    def after_step(self, trainer: Trainer) -> None:
        """Save when the interval is full."""
        if self.config.interval and trainer.step % self.config.interval == 0:
            self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Save the last step unless it has just been saved."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.config.directory is None or self.saved_step == trainer.step:
            return
        path = trainer.save(self.config.directory, keep_last=self.config.keep_last)
        self.saved_step = trainer.step
        for callback in trainer.callbacks:
            callback.on_save(trainer, trainer.step, str(path))

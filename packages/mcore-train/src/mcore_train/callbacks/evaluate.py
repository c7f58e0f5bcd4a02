"""Validation during the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_train.callbacks.base import Callback
from mcore_train.config import EvaluateConfig

if TYPE_CHECKING:
    from mcore_train.step import StepMetrics
    from mcore_train.trainer import Trainer


_UNNAMED = "validation"


class Evaluate(Callback):
    """Measure the validation loss every `interval` steps and after the last one.

    With sets by name the loss of each is `validation/NAME`, and `validation` the mean over sets.
    """

    def __init__(self, config: EvaluateConfig) -> None:
        self.config = config
        self.evaluated_step: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Evaluate what was loaded or initialised, when the config asks for it."""
        if self.config.at_start:
            self._evaluate(trainer)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Evaluate when the interval is full."""
        if self.config.interval and trainer.step % self.config.interval == 0:
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Evaluate once more, unless this step has just been evaluated."""
        self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        sets = trainer.session.data.validation_sets
        if self.evaluated_step == trainer.step or not sets:
            return
        self.evaluated_step = trainer.step
        losses = {name: trainer.evaluate(name) for name in sets}
        named = tuple(sets) != (_UNNAMED,)
        rows = {f"{_UNNAMED}/{name}": loss for name, loss in losses.items() if named}
        rows[_UNNAMED] = sum(losses.values()) / len(losses)
        for name, loss in rows.items():
            for callback in trainer.callbacks:
                callback.on_evaluate(trainer, name, loss)

"""What may happen around the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_train.step import StepMetrics
    from mcore_train.trainer import Trainer


class Callback:
    """A part of a run that is not the loop: it is told what happens, and owns its own state.

    Every rank holds the same callbacks in the same order and calls each hook at the same moment,
    so a hook may communicate over the groups of `trainer.session.mesh`. A callback with state to
    keep gives it a `name` and returns JSON-able values from `state_dict`.
    """

    name: str = ""

    def on_start(self, trainer: Trainer) -> None:
        """Called once, after a checkpoint was loaded (if any) and before the first step."""

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Called after every optimizer step; `trainer.step` already counts it."""

    def after_step(self, trainer: Trainer) -> None:
        """Called when every callback has had its `on_step`: their state is that of this step."""

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        """Called when a validation loss is known (mean over all valid tokens, nats).

        In a run that is about something else than a loss it is that: a mean reward, say.
        """

    def on_save_requested(self, trainer: Trainer, step: int) -> None:
        """Called when the state of `step` is going to be saved."""

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        """Called when the checkpoint of `step` is complete and committed.

        When it is written in the background, `trainer.step` has gone on by then.
        """

    def on_local_save(self, trainer: Trainer, step: int) -> None:
        """Called when the state of `step` is on the disks of all machines, copies included."""

    def on_save_failed(self, trainer: Trainer, step: int, error: str) -> None:
        """Called when the checkpoint of `step` could not be written, and training goes on."""

    def on_end(self, trainer: Trainer) -> None:
        """Called once after the last step, also when a signal ended the run early."""

    def close(self) -> None:
        """Called once at the very end, also after an error: release what is held."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able state for the checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

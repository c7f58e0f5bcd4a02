"""What happens around the steps of reinforcement learning, besides what `mcore_train` offers."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from mcore_rl.config import HeldOutConfig
from mcore_rl.engines import RolloutEngines
from mcore_rl.plot import plot_rewards
from mcore_rl.tasks import held_out_tasks
from mcore_train import StepMetrics, Trainer
from mcore_train.callbacks import Callback

HELD_OUT = "held_out"
CURVE = "reward.png"


class EvaluateRewards(Callback):
    """Measure the mean reward on held-out tasks, when the config says and after the last step."""

    def __init__(self, config: HeldOutConfig, engines: RolloutEngines) -> None:
        self.config = config
        self.engines = engines
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
        if self.evaluated_step == trainer.step:
            return
        self.evaluated_step = trainer.step
        self.engines.update_weights()
        rollouts = self.engines.evaluate(held_out_tasks(self.config.tasks))
        reward = fmean(rollout.reward for rollout in rollouts)
        for callback in trainer.callbacks:
            callback.on_evaluate(trainer, HELD_OUT, reward)


class DrawRewards(Callback):
    """Draw the reward curve of `metrics.jsonl` when the run ends, also when a signal ends it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_end(self, trainer: Trainer) -> None:
        """Draw on rank 0."""
        if trainer.session.mesh.rank == 0:
            plot_rewards(self.directory / "metrics.jsonl", self.directory / CURVE)

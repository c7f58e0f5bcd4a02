"""The tasks of a run, in an order that is a function of the seed alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.addresses import Place, place
from mcore_data import Tokenizer
from mcore_models import TokenBatch
from mcore_parallel import RngKey
from mcore_rl.config import RLConfig

HELD_OUT = RngKey(0).fold("held-out tasks")
"""Root of the seeds of held-out tasks: the same for all runs, so that these can be compared."""


def training_task(seed: int, index: int) -> int:
    """Return the environment's seed of the training task `index` of a run."""
    return RngKey(seed).fold("task", index).seed


def held_out_tasks(count: int) -> list[int]:
    """Return the environment's seeds of held-out tasks; no run trains on them but by chance."""
    return [HELD_OUT.fold(index).seed for index in range(count)]


class Tasks:
    """The source of what a step learns from: seeds of tasks, never the same twice.

    Satisfies `mcore_train.DataSource`. Every rank has all of them, without communication.
    `reference` is the checkpoint that the reference policy is read from, None for one that starts
    from random weights; it is that of the run's start, also after a resume.
    """

    validation_sets: Sequence[str] = ()

    def __init__(
        self, config: RLConfig, tokenizer: Tokenizer, *, reference: Place | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.reference = reference
        self.taken = 0

    def batches(self) -> Iterator[list[int]]:
        """Yield the tasks of one step after another."""
        per_step = self.config.tasks_per_step
        while True:
            first, self.taken = self.taken, self.taken + per_step
            yield [training_task(self.config.seed, i) for i in range(first, self.taken)]

    def after(self, consumed: int) -> int:
        """Return the rollouts taken after the step that follows `consumed`."""
        return consumed + self.config.batch.global_size

    def counters(self, consumed: int) -> Mapping[str, float]:
        """Return nothing: there is one source of tasks."""
        return {}

    def validation_batches(self, name: str) -> list[TokenBatch]:
        """Return nothing: rewards are measured on held-out tasks instead of a loss on text."""
        return []

    def files(self) -> dict[str, Path | bytes]:
        """Return the tokenizer's files, which travel with a checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(folder)
            paths = sorted(Path(folder).iterdir())
            return {f"tokenizer/{path.name}": path.read_bytes() for path in paths}

    def state_dict(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint needs to go on after `consumed` rollouts, JSON-able."""
        reference = None if self.reference is None else str(self.reference)
        return {"consumed_samples": consumed, "reference": reference, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: the tasks would be others: another environment, group size or seed.
        """
        if "environment" not in state:
            raise ValueError(
                "the checkpoint is not of a run on tasks: take its weights alone "
                "(checkpoint.load with weights_only)"
            )
        for name, now in self._identity().items():
            if state[name] != now:
                raise ValueError(
                    f"the run has been on {name}={state[name]}, the config says {now}: use "
                    f"{state[name]}, or start with checkpoint.reset_step"
                )
        size = self.config.rollout.group_size
        self.taken = int(state["consumed_samples"]) // size
        self.reference = None if state["reference"] is None else place(state["reference"])

    def close(self) -> None:
        """Nothing is held."""

    def _identity(self) -> dict[str, Any]:
        return {
            "environment": self.config.environment.name,
            "options": dict(self.config.environment.options),
            "group_size": self.config.rollout.group_size,
            "seed": self.config.seed,
        }

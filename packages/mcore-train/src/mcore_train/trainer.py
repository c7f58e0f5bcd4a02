"""The loop, and nothing else: everything around it is a callback."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import mcore_ckpt
from mcore_ckpt import CheckpointError
from mcore_ckpt.addresses import Place
from mcore_train.callbacks import Callback
from mcore_train.config import TrainConfig
from mcore_train.local_start import find_local_start
from mcore_train.schedules import learning_rate
from mcore_train.session import Session
from mcore_train.state import (
    Progress,
    WhatToLoad,
    WhatToSave,
    find_start,
    load_state,
    what_to_save,
)
from mcore_train.step import Step, TrainStep, evaluate


class Trainer:
    """Runs a session from the step it stands at to the last one, each by calling `step`.

    `progress` counts finished steps and consumed samples and is part of a checkpoint; `resumed`
    says whether the run continues an earlier one (`resumed_locally`: from what the machines kept),
    `checkpoint` is its newest. A callback may set
    `stop_requested`: all ranks then stop after the step in flight, and `run` returns normally.
    """

    def __init__(
        self,
        session: Session,
        callbacks: Sequence[Callback] = (),
        *,
        step: TrainStep | None = None,
    ) -> None:
        self.session = session
        self.config: TrainConfig = session.config
        self.callbacks = tuple(callbacks)
        self.progress = Progress()
        self.resumed = False
        self.resumed_locally = False
        self.checkpoint: Place | None = None
        self.stop_requested = False
        self.train_step: TrainStep = step or Step(session)

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.progress.step

    def run(self) -> None:
        """Load what the config says, then train to `config.steps`.

        Raises:
            ValueError: the checkpoint does not fit.
            FloatingPointError: loss or gradient is not finite.
        """
        self.load()
        try:
            for callback in self.callbacks:
                callback.on_start(self)
            batches = self.session.data.batches()
            agreed = False  # a request seen by one rank alone must not end that rank alone
            while self.step < self.config.steps and not agreed:
                metrics = self.train_step(
                    next(batches),
                    lr=learning_rate(self.config.schedule, self.step, self.config.steps),
                    rng=self.session.rng.next("dropout"),
                    stop=self.stop_requested,
                )
                self.progress.step += 1
                self.progress.consumed = self.session.data.after(self.progress.consumed)
                agreed = metrics.stop
                counters = self.session.data.counters(self.progress.consumed)
                metrics = dataclasses.replace(metrics, extra={**metrics.extra, **counters})
                for callback in self.callbacks:
                    callback.on_step(self, metrics)
                for callback in self.callbacks:
                    callback.after_step(self)
            for callback in self.callbacks:
                callback.on_end(self)
        finally:
            self.session.data.close()  # no rank needs another for it, unlike the channel's
            for callback in self.callbacks:
                callback.close()

    def evaluate(self, name: str = "validation") -> float:
        """Return the validation loss: mean over all valid tokens of the windows of a set."""
        return evaluate(self.session, name)

    def what_to_save(self) -> WhatToSave:
        """Return the whole state of this rank as it is now; the tensors are no copies."""
        states = {c.name: c.state_dict() for c in self.callbacks if c.name}
        return what_to_save(self.session, self.progress, states)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        compression: str | None = None,
        file_bytes: int | None = None,
    ) -> Place:
        """Save the whole state below `directory` (or an address); returns when it is durable."""
        what = self.what_to_save()
        path = mcore_ckpt.save(
            directory,
            step=what.step,
            tensors=what.tensors,
            state=what.state,
            files=what.files,
            group=self.session.mesh.world,
            keep_last=keep_last,
            keep_every=keep_every,
            compression=compression,
            file_bytes=file_bytes,
        )
        self.checkpoint = path
        return path

    def load(self) -> None:
        """Start from the checkpoint that the config names, if there is one."""
        config = self.config.checkpoint
        world = self.session.mesh.world
        start = find_start(config, world)
        found, same_run = (None, False) if start is None else start
        self.checkpoint = found.path if found is not None and same_run else None
        local = find_local_start(config, start, world)
        what = WhatToLoad(strict=config.strict)
        if local is not None:
            try:
                self._take(*load_state(self.session, local, what))
                self.resumed = self.resumed_locally = True
                return
            except CheckpointError as error:
                text = " ".join(str(error).split())
                warnings.warn(
                    f"the local save is passed over: {text}", RuntimeWarning, stacklevel=2
                )
        if found is None:
            return
        if not same_run:
            what = WhatToLoad.of(config)
        self._take(*load_state(self.session, found, what))
        self.resumed = same_run

    def _take(self, progress: Progress, states: Mapping[str, Any]) -> None:
        self.progress = progress
        for callback in self.callbacks:
            if callback.name in states:
                callback.load_state_dict(states[callback.name])

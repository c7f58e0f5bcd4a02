"""Saving while training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mcore_ckpt import AsyncSaver, CheckpointError
from mcore_ckpt.addresses import Place
from mcore_ckpt.local import save_local
from mcore_train.callbacks.base import Callback
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.extra import state_tensors
from mcore_train.local_start import local_state, run_directory

if TYPE_CHECKING:
    from mcore_train.trainer import Trainer


class SaveCheckpoints(Callback):
    """Save every `interval` steps and at the end of the run (also when a signal ends it).

    That a save is requested and that it is completed are two events, `on_save_requested` and
    `on_save`, both with the step whose state it is. In the background the second one comes some
    steps later, at the same moment on all ranks. Between these saves there may be local ones.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self.requested_step: int | None = None
        self.saver: AsyncSaver | None = None
        self.run = ""

    def on_start(self, trainer: Trainer) -> None:
        """Remember the step that was loaded: it need not be saved again."""
        if trainer.resumed and not trainer.resumed_locally:
            self.requested_step = trainer.step
        if self.config.local is not None and self.config.directory is not None:
            self.run = run_directory(self.config.directory, trainer.session.mesh.world)
        if self.config.asynchronous:
            self.saver = AsyncSaver(trainer.session.mesh.world)
            self.saver.prepare(state_tensors(trainer.session))

    def after_step(self, trainer: Trainer) -> None:
        """Tell of a save that has been completed; save when an interval is full."""
        self._collect(trainer, wait=False)
        config, step = self.config, trainer.step
        if config.interval and step % config.interval == 0:
            self._save(trainer)
        elif config.local_interval and step % config.local_interval == 0:
            self._save_locally(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Save the last step unless that has been done, and wait until it is durable.

        Raises:
            CheckpointError: the last save failed, whatever `on_error` says.
        """
        self._collect(trainer, wait=True)  # may find that this very step is not saved after all
        self._save(trainer, last=True)
        self._collect(trainer, wait=True, last=True)

    def close(self) -> None:
        """Let a save that is under way finish, also after an error; Ctrl-C abandons it."""
        saver, self.saver = self.saver, None
        if saver is None:
            return
        reason = sys.exc_info()[1]  # what ends the run, if it is an error
        try:
            saver.close(abandon=isinstance(reason, KeyboardInterrupt))
        except (ValueError, OSError, RuntimeError) as error:
            if reason is None:
                raise
            print(f"mcore-train: {' '.join(str(error).split())}", file=sys.stderr)

    def _save(self, trainer: Trainer, *, last: bool = False) -> None:
        config, step = self.config, trainer.step
        if config.directory is None or self.requested_step == step:
            return
        self._collect(trainer, wait=True)
        self.requested_step = step
        for callback in trainer.callbacks:
            callback.on_save_requested(trainer, step)
        if self.saver is not None:
            what = trainer.what_to_save()
            self.saver.save(
                config.directory,
                step=what.step,
                tensors=what.tensors,
                state=what.state,
                files=what.files,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                compression=config.compression,
                file_bytes=config.file_bytes,
            )
            return
        try:
            path = trainer.save(
                config.directory,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                compression=config.compression,
                file_bytes=config.file_bytes,
            )
        except CheckpointError as error:
            self._failed(trainer, step, error, last)
        else:
            self._completed(trainer, step, path)

    def _save_locally(self, trainer: Trainer) -> None:
        self._collect(trainer, wait=True)
        config, what = self.config, trainer.what_to_save()
        assert config.local is not None
        state = local_state(what, trainer.checkpoint, self.run)
        if self.saver is not None:
            self.saver.save_local(
                config.local,
                step=what.step,
                tensors=what.tensors,
                state=state,
                copies=config.local_copies,
            )
            return
        try:
            save_local(
                config.local,
                step=what.step,
                tensors=what.tensors,
                state=state,
                group=trainer.session.mesh.world,
                copies=config.local_copies,
            )
        except CheckpointError as error:
            self._failed(trainer, what.step, error, last=False)
        else:
            for callback in trainer.callbacks:
                callback.on_local_save(trainer, what.step)

    def _collect(self, trainer: Trainer, *, wait: bool, last: bool = False) -> None:
        """Tell of what was completed in the background since the last time."""
        if self.saver is None or self.saver.pending is None:
            return
        step = self.saver.pending.step
        try:
            for done in self.saver.wait() if wait else self.saver.poll():
                if not done.is_local:
                    self._completed(trainer, done.step, done.wait())
                    continue
                for callback in trainer.callbacks:
                    callback.on_local_save(trainer, done.step)
        except CheckpointError as error:
            self._failed(trainer, step, error, last)

    def _completed(self, trainer: Trainer, step: int, path: Place) -> None:
        trainer.checkpoint = path
        for callback in trainer.callbacks:
            callback.on_save(trainer, step, str(path))

    def _failed(self, trainer: Trainer, step: int, error: CheckpointError, last: bool) -> None:
        if last or self.config.on_error == "stop":
            raise error
        if self.requested_step == step:
            self.requested_step = None  # so that the end of the run tries again
        text = " ".join(str(error).split())
        if trainer.session.mesh.rank == 0:
            print(f"mcore-train: {text}; training goes on", file=sys.stderr)
        for callback in trainer.callbacks:
            callback.on_save_failed(trainer, step, text)

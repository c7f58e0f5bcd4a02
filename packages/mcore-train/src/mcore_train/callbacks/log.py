"""Numbers of the run: lines on the terminal, `metrics.jsonl`, TensorBoard, a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from mcore_train.callbacks.base import Callback
from mcore_train.config import LogConfig

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

    from mcore_train.step import StepMetrics
    from mcore_train.trainer import Trainer


class MetricsLog(Callback):
    """Append one JSON object per event to `directory/metrics.jsonl` (rank 0 only).

    Training rows have `step loss lr grad_norm tokens tokens_per_second` and what `extra` numbers
    the step gave, validation rows `step validation_loss`. Checkpoint rows are `step save_requested`
    when that is due, and `step saved` or `step saved_locally` once it is durable (or `step
    save_failed`): `step` is the one that is saved, also when others have been run meanwhile. Losses
    are the values used: the mean over all valid tokens of the global batch. After a resume, rows of
    steps that will be run again are dropped first, so the file reads like an uninterrupted run.

    `measure` is what evaluations give, in place of losses: it ends the names of their values.
    """

    def __init__(self, config: LogConfig, *, measure: str = "loss") -> None:
        self.config = config
        self.measure = measure
        self.path = config.directory / "metrics.jsonl" if config.directory else None
        self.writer: SummaryWriter | None = None
        self.active = False
        self.clock = time.perf_counter()
        self.stepped = self.clock
        self.tokens = 0
        self.unlogged: StepMetrics | None = None
        self.evaluated: set[tuple[int, str]] = set()

    def on_start(self, trainer: Trainer) -> None:
        """Open the files on rank 0."""
        self.clock = self.stepped = time.perf_counter()
        self.active = trainer.session.mesh.rank == 0 and self.path is not None
        if not self.active or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.path) if row["step"] <= trainer.step]
        self.evaluated = {(row["step"], key) for row in kept for key in row}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, self.path)
        if self.config.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self.writer = SummaryWriter(str(self.path.parent / "tensorboard"), trainer.step)

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Log every `interval` steps, the first and the last."""
        self.tokens += metrics.tokens
        self.stepped = time.perf_counter()
        self.unlogged = metrics
        first_or_last = trainer.step in {1, trainer.config.steps}
        if trainer.step % self.config.interval == 0 or first_or_last:
            self._log_step(trainer.step)

    def on_end(self, trainer: Trainer) -> None:
        """Log the last step of a run that a signal ended early."""
        self._log_step(trainer.step)

    def _log_step(self, step: int) -> None:
        metrics, self.unlogged = self.unlogged, None
        if not self.active or metrics is None:
            return
        now = time.perf_counter()
        rate = self.tokens / max(now - self.clock, 1e-9)
        self.clock, self.tokens = now, 0
        self._write(
            step=step,
            loss=metrics.loss,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm if math.isfinite(metrics.grad_norm) else None,
            tokens=metrics.tokens,
            tokens_per_second=round(rate, 1),
            **metrics.extra,
        )

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        """Log a validation loss; its time is not that of training."""
        self.clock += self._since_step()
        label = f"{name}_{self.measure}"
        if self.active and (trainer.step, label) not in self.evaluated:
            self._write(step=trainer.step, **{label: loss})

    def on_save_requested(self, trainer: Trainer, step: int) -> None:
        """Log that a checkpoint is due."""
        if self.active:
            self._write(step=step, save_requested=True)

    def on_local_save(self, trainer: Trainer, step: int) -> None:
        """Log that a local checkpoint is complete; its time is not that of training."""
        self.clock += self._since_step()
        if self.active:
            self._write(step=step, saved_locally=True)

    def on_save_failed(self, trainer: Trainer, step: int, error: str) -> None:
        """Log that a checkpoint could not be written."""
        if self.active:
            self._write(step=step, save_failed=error)

    def on_save(self, trainer: Trainer, step: int, path: str) -> None:
        """Log that a checkpoint is complete; its time is not that of training."""
        self.clock += self._since_step()
        if self.active:
            self._write(step=step, saved=path)

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def _since_step(self) -> float:
        """Seconds since the last step ended; from now on they count as gone."""
        before, self.stepped = self.stepped, time.perf_counter()
        return self.stepped - before

    def _write(self, *, step: int, **values: Any) -> None:
        assert self.path is not None
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.writer.add_scalar(name, value, step)


class Progress(Callback):
    """A progress bar over the steps on rank 0, written to stderr.

    It shows the loss, or what else `measure` names among the numbers of a step. In front of it
    stands a line about what multiplies in few bits, if anything does.
    """

    def __init__(self, *, measure: str = "loss") -> None:
        self.measure = measure
        self.bar: tqdm[Any] | None = None
        self.validation = ""

    def on_start(self, trainer: Trainer) -> None:
        """Open the bar at the step reached so far."""
        if trainer.session.mesh.rank == 0:
            if trainer.session.low_precision is not None:
                tqdm.write(trainer.session.low_precision.describe(), file=sys.stderr)
            total, done = trainer.config.steps, trainer.step
            self.bar = tqdm(
                total=total, initial=done, unit="step", desc="train", file=sys.stderr, mininterval=1
            )

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Advance the bar by one step."""
        if self.bar is not None:
            value = metrics.extra.get(self.measure, metrics.loss)
            text = f"{self.measure} {value:.3f}{self.validation}"
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(1)

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        """Show the newest validation loss."""
        self.validation = f", {name} {loss:.3f}"

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`; lines cut short or damaged are left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows

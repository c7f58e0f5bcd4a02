"""What every stage is doing, told to the others when it takes long, so that a fault has a name."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from mcore_parallel import _torch
from mcore_parallel.faults import bounded
from mcore_parallel.pipeline.actions import Action
from mcore_parallel.pipeline.channel import Channel

_TICKS = 4  # reports within one timeout
_STORE = 5.0  # seconds in which the store has to answer a stage in trouble


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a stage last said of itself.

    run: the number of its run. at: seconds since 1970. doing: its action. waits_for: the stage
    whose message it waits for. fault: why it gave up, in terms of the stage at the root of it.
    """

    run: int
    at: float
    doing: str
    waits_for: int | None = None
    fault: str | None = None


class Watch:
    """Tells the other stages what this one is doing, and finds out who is in the way.

    A thread writes a report into the store of torch.distributed four times per timeout: nothing
    while runs are shorter than that, and on a stage that hangs the reports go on. A stage in
    trouble reads the reports along the line of those who wait for one another.
    """

    def __init__(self, channel: Channel) -> None:
        self._group = channel.group
        self._run = channel.runs
        self._timeout = channel.timeout.total_seconds()
        self._now: tuple[Action | None, int | None] = None, None
        self._stop = threading.Event()
        self._store: Any = _torch.default_store() if self._group.size > 1 else None
        self._thread = threading.Thread(target=self._tell, name="pipeline watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()

    def doing(self, action: Action, waits_for: int | None = None) -> None:
        """Note what this stage does from now on."""
        self._now = action, waits_for

    def failed(self, fault: str) -> None:
        """Tell the others why this stage gives up, before they see it go."""
        self._stop.set()
        with contextlib.suppress(TimeoutError):
            bounded(partial(self._write, fault), _STORE)

    def who_is_late(self, stage: int) -> str:
        """Say who keeps `stage` from sending: the one at the end of those who wait for others."""
        passed: set[int] = set()
        while True:
            try:
                report = bounded(partial(self._read, stage), _STORE)
            except TimeoutError:
                return f"nothing from {self.name(stage)}, nor from the store of torch.distributed"
            if report is None or report.run < self._run:
                return f"{self.name(stage)} gives no sign of life in this run"
            if report.fault is not None:
                return report.fault
            if time.time() - report.at > self._timeout:
                return f"{self.name(stage)} gives no sign of life since {report.doing}"
            passed.add(stage)
            if report.waits_for is None or report.waits_for in passed:
                return f"{self.name(stage)} is in {report.doing}"
            stage = report.waits_for

    def who_is_gone(self, stage: int) -> str:
        """Say who is at the root of it when the connection to `stage` broke."""
        with contextlib.suppress(TimeoutError):
            report = bounded(partial(self._read, stage), _STORE)
            if report is not None and report.run == self._run and report.fault is not None:
                return report.fault
        return f"{self.name(stage)} is gone"

    def name(self, stage: int) -> str:
        """Return how messages call a stage."""
        return f"rank {self._group.ranks[stage]} (stage {stage})"

    def _key(self, stage: int) -> str:
        return f"mcore/pipeline/{'_'.join(map(str, self._group.ranks))}/{stage}"

    def _tell(self) -> None:
        while not self._stop.wait(self._timeout / _TICKS):
            self._write(None)

    def _write(self, fault: str | None) -> None:
        action, waits_for = self._now
        if self._store is None or action is None:
            return
        report = Report(
            run=self._run, at=time.time(), doing=str(action), waits_for=waits_for, fault=fault
        )
        try:
            self._store.set(self._key(self._group.rank), json.dumps(vars(report)))
        except RuntimeError:  # the store went down with its rank: whoever waits will say so
            self._stop.set()

    def _read(self, stage: int) -> Report | None:
        key = self._key(stage)
        try:
            return Report(**json.loads(self._store.get(key))) if self._store.check([key]) else None
        except RuntimeError:
            return None

"""A collective that fails because another rank is gone or silent says which one, and in what."""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from mcore_parallel import _torch
from mcore_parallel._failure import is_lost
from mcore_parallel.group import Group

_STORE = 5.0  # seconds in which the store has to answer a rank in trouble
_NOTICE = {True: 3.0, False: 1.0}  # seconds for the others to say that they failed, too, when late
_POLL = 0.05
_SILENT_STORE = "the store of torch.distributed does not answer, so nobody can say which rank it is"

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective cannot end: a rank of its group died, stalled, or called something else.

    rank: mine. operation, group: what failed here. reason: the ranks at the root of it, as far as
    the others have told.
    """

    def __init__(self, rank: int, operation: str, group: str, reason: str) -> None:
        self.rank, self.operation, self.group, self.reason = rank, operation, group, reason
        super().__init__(f"rank {rank}, {operation} over {group}: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return CollectiveError, (self.rank, self.operation, self.group, self.reason)


@contextmanager
def guarded(operation: str, group: Group) -> Iterator[None]:
    """Within the block this rank is in a collective: what torch says of lost ranks gets names.

    Only after an error anything is exchanged (through the store of torch.distributed), for a few
    seconds at most. What NCCL does when a rank is lost, torch decides: it may end the process.
    """
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise _named(operation, group, error) from error


class GuardedWork:
    """A communication under way whose `wait` gives names to lost ranks, as `guarded` does."""

    def __init__(self, work: Any, operation: str, group: Group) -> None:
        self._work, self._operation, self._group = work, operation, group

    def wait(self, timeout: datetime.timedelta | None = None) -> Any:
        """Return once the result may be used (on CUDA: by the current stream)."""
        with guarded(self._operation, self._group):
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it is known to be over."""
        return bool(self._work.is_completed())


def _named(operation: str, group: Group, error: RuntimeError) -> CollectiveError:
    late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    what = "timed out" if late else "connection closed"
    label = f"{group.name or 'group'} (ranks {', '.join(map(str, group.ranks))})"
    rank = group.ranks[group.rank]
    try:
        root = bounded(lambda: _Inquiry(operation, group, late).root())
    except TimeoutError:
        root = _SILENT_STORE
    return CollectiveError(rank, operation, label, f"{what}: {root}")


def not_made(name: str, ranks: tuple[int, ...], rank: int, error: RuntimeError) -> CollectiveError:
    """Return what to raise where a group cannot be made: a member did not come, or went away."""

    def absent() -> list[int] | None:
        with contextlib.suppress(RuntimeError):  # the store went down with its rank
            return _torch.who_has_not_come(ranks, name)
        return None

    reason = f"all have begun, and one went away or is late: {error}"
    try:
        missing = bounded(absent)
    except TimeoutError:
        missing = None
    if missing is None:
        reason = _SILENT_STORE
    elif missing:
        reason = f"{_ranks(missing)} {'have' if len(missing) > 1 else 'has'} not come"
    label = f"{name} (ranks {', '.join(map(str, ranks))})"
    return CollectiveError(rank, "Group.create", label, f"wait timeout: {reason}")


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank in trouble tells the others: in what, and who is at the root of it.

    It stands until the rank makes groups again (`_torch.withdraw_fault`): one in which something
    failed cannot be used any more, so that no report is of an earlier fault than the group's.
    """

    doing: str
    root: str | None = None


class _Inquiry:
    """Finds who is at the root of a fault: whoever does not report any, or what others found.

    Over gloo a rank whose connection is open is alive, though it may be busy and not report.
    """

    def __init__(self, operation: str, group: Group, late: bool) -> None:
        self._group = group
        self._late = late
        self._doing = f"{operation} over {group.name or 'group'}"
        self._store = _torch.default_store()
        self._me = group.ranks[group.rank]
        self._others = [rank for rank in group.ranks if rank != self._me]

    def root(self) -> str:
        """Return who is at the root of it, and pass it on to those who wait for this rank."""
        closed = self._closed()
        self._tell(None)
        self._free_others()
        notice = _NOTICE[self._late]
        reports = self._listen(notice, lambda reports: len(reports) == len(self._others))
        silent = [rank for rank in closed if rank not in reports]
        if not silent:  # they look into it themselves, in their own groups
            reports = self._listen(notice + 1.0, lambda reports: False)
        found = next((r.root for r in reports.values() if r.root), None)
        if found is None and silent:
            found = _ranks(silent) + _missing(len(silent), self._late)
        elif found is None:
            found = "its ranks are in different operations: " + ", ".join(
                f"rank {rank} in {report.doing}" for rank, report in reports.items()
            )
        self._tell(found)
        return found

    @property
    def _is_open(self) -> bool:
        """Whether only connections to some ranks are closed; a timeout closes all of them."""
        pg = self._group.pg
        return not self._late and pg is not None and _torch.has_cpu_backend(pg)

    def _closed(self) -> list[int]:
        """Return the ranks that may be gone."""
        if not self._is_open:
            return self._others
        closed = _torch.closed_peers(self._group.process_group)
        return [rank for rank in self._others if rank in closed] or self._others

    def _free_others(self) -> None:
        """End the waits of others for this rank, and so for whomever it waited for."""
        if self._is_open:
            _torch.break_connections(self._group.process_group)

    def _listen(
        self, seconds: float, enough: Callable[[dict[int, _Report]], bool]
    ) -> dict[int, _Report]:
        deadline = time.monotonic() + seconds
        while True:
            heard = {rank: report for rank in self._others if (report := self._heard(rank))}
            done = enough(heard) or any(report.root for report in heard.values())
            if done or time.monotonic() > deadline:
                return heard
            time.sleep(_POLL)

    def _tell(self, root: str | None) -> None:
        report = _Report(doing=self._doing, root=root)
        with contextlib.suppress(RuntimeError):
            self._store.set(_torch.fault_key(self._me), json.dumps(asdict(report)))

    def _heard(self, rank: int) -> _Report | None:
        try:
            key = _torch.fault_key(rank)
            if not self._store.check([key]):
                return None
            return _Report(**json.loads(self._store.get(key)))
        except RuntimeError:  # the store went down with its rank
            return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _missing(count: int, late: bool) -> str:
    if late:
        return f" {'have' if count > 1 else 'has'} not come, and not failed either"
    return f" {'are' if count > 1 else 'is'} gone"


def bounded(call: Callable[[], T], seconds: float = _STORE + 3 * _NOTICE[True]) -> T:
    """Return what a call to the store returns; TimeoutError when it hangs.

    It hangs with the rank that serves the store, or that stopped while it held the store's lock.
    """
    answer: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(call()), daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("the store does not answer") from None

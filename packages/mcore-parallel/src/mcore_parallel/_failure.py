"""How an error travels from a rank to the process that started it."""

from __future__ import annotations

import dataclasses
import pickle
import re
import signal
import traceback
from dataclasses import dataclass

# What gloo, NCCL and the stores say when the fault lies with another rank.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|reset by peer|closed by peer|broken pipe"
    r"|timed out(:| waiting| after)|timeout (waiting|after)|wait timeout|pair closure|socket"
    r"|gloo connect|remote process exited|nccl (communicator|error)|no key .* in store|get store",
    re.IGNORECASE,
)


def is_lost(error: BaseException) -> bool:
    """Whether `error` says that another rank went away or did not come in time."""
    return isinstance(error, RuntimeError | OSError) and bool(_LOST.search(str(error)))


class RankDiedError(RuntimeError):
    """The process of a rank ended in the middle of its work."""


def how_ended(exitcode: int | None) -> str:
    """Return a word for the exit code of a process, such as "SIGKILL" or "status 1"."""
    if exitcode is None or exitcode >= 0:
        return f"status {exitcode}"
    return signal.Signals(-exitcode).name


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error of one rank, in a form that can be pickled.

    rank, size: of the rank and its world. text: its traceback. pickled: the exception, if it could
    be. lost: whether it only says that another rank went away.
    """

    rank: int
    size: int
    text: str
    summary: str
    pickled: bytes | None
    lost: bool

    @staticmethod
    def of(error: BaseException, rank: int, size: int, *, lost: bool | None = None) -> Failure:
        """Describe `error`, which rank `rank` of `size` raised; `lost` None: as its text says."""
        summary = f"{type(error).__name__}: {error}"
        try:
            pickled: bytes | None = pickle.dumps(error)
            pickle.loads(pickled or b"")  # an exception with its own __init__ may not come back
        except Exception:
            pickled = None
        if lost is None:
            lost = is_lost(error)
        text = "".join(traceback.format_exception(error))
        return Failure(rank=rank, size=size, text=text, summary=summary, pickled=pickled, lost=lost)

    def excused(self) -> Failure:
        """Return this failure as one that only follows from something else."""
        return dataclasses.replace(self, lost=True)

    def exception(self) -> BaseException:
        """Return what to raise: the error itself if possible, with a note that names the rank."""
        where = f"rank {self.rank} of {self.size}"
        if self.pickled is None:
            error: BaseException = RuntimeError(f"{where}: {self.summary}")
        else:
            error = pickle.loads(self.pickled)
        error.add_note(f"raised on {where}:\n{self.text.rstrip()}")
        return error


def first_real(failures: list[Failure]) -> Failure:
    """Return the first failure, in order of arrival, that is not the loss of another rank."""
    return next((f for f in failures if not f.lost), failures[0])

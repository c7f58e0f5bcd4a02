"""Starting ranks: joining the world that torchrun describes, or starting one on this machine.

The only module that reads the environment.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

from mcore_parallel import _torch
from mcore_parallel._call import Call
from mcore_parallel._failure import Failure, RankDiedError, first_real, how_ended
from mcore_parallel._process import die_with_parent, kill_tree, leave_world

Device = Literal["cpu", "cuda"]
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_NOTICE = 5.0  # seconds that the other ranks have to report after one has failed
_KILL = 5.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's place: its rank, the world's size, its number on this machine, its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def init_from_env(
    *,
    device: Device | None = None,
    backend: str | None = None,
    timeout: datetime.timedelta | None = None,
) -> Place:
    """Join the world that torchrun's environment variables describe; return my place in it.

    Without these variables the world is this process alone, and torch.distributed stays as it is;
    where it is initialised already, that world is the answer. `device` defaults to CUDA where there
    is any (GPU number LOCAL_RANK becomes the current one), `backend` to nccl there and gloo
    elsewhere. ValueError when variables are missing or wrong, or there are too few GPUs.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_available() and dist.is_initialized():
        local = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else dist.get_rank()
        return _place(dist.get_rank(), dist.get_world_size(), local, device)
    present = [name for name in _TORCHRUN if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return _place(0, 1, 0, device)
    missing = [name for name in _TORCHRUN if name not in present]
    if missing:
        raise ValueError(
            f"environment variables {', '.join(present)} are set but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: start with torchrun, or unset them"
        )
    rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not in a world of WORLD_SIZE={world_size} ranks")
    place = _place(rank, world_size, _integer("LOCAL_RANK"), device)
    dist.init_process_group(
        backend or ("nccl" if device == "cuda" else "gloo"), init_method="env://", timeout=timeout
    )
    return place


def launched_by_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or the like) has started."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def world_size_from_env() -> int:
    """The number of ranks that torchrun (or the like) has started, 1 where there is none."""
    return _integer("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1


def _place(rank: int, world_size: int, local_rank: int, device: Device) -> Place:
    if device == "cpu":
        where = torch.device("cpu")
    else:
        count = torch.cuda.device_count()
        if not 0 <= local_rank < count:
            raise ValueError(
                f"local rank {local_rank} has no GPU: this machine has {count}; start at most "
                f"{count} processes on it, or choose device 'cpu'"
            )
        where = torch.device("cuda", local_rank)
        torch.cuda.set_device(where)
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, device=where)


def _integer(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"environment variable {name}={text!r} is not a whole number")
    return int(text)


def launch_local(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    device: Device = "cpu",
    backend: str | None = None,
    timeout: datetime.timedelta | None = None,
    threads: int | None = None,
    stop_grace: float = 60.0,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run `fn(*args)` in `nproc` new processes of this machine; return what it returns, by rank.

    Each is a rank of one world (gloo; nccl with device "cuda", rank r on GPU r) that meets over a
    file. `fn` is a function at the top level of a module; arguments and results are pickled.
    `threads` per process default to an equal share of the cores. Modules named in `preload` are
    imported once, by the first launch of this process, and not by every rank; such a module starts
    no thread and leaves GPUs alone.

    When a rank fails all are ended, and the first error that is not just the loss of another rank
    is raised, with a note that names the rank; RankDiedError when a process ended. SIGTERM
    and SIGINT are passed on to every rank, which have `stop_grace` seconds to return; if they do
    their results are returned, otherwise KeyboardInterrupt or SystemExit (128 + signal) is raised.
    A second signal kills. No process outlives this one.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be at least 1, not {nproc}")
    if device == "cuda" and nproc > torch.cuda.device_count():
        raise ValueError(
            f"nproc = {nproc} is more than the {torch.cuda.device_count()} GPUs of this machine"
        )
    call = Call.of(fn, args, {})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mcore_parallel.launch", *preload])
    folder = Path(tempfile.mkdtemp(prefix="mcore-launch-"))
    setting = _Setting(
        nproc=nproc,
        rendezvous=str(folder / "world"),
        device=device,
        backend=backend or ("nccl" if device == "cuda" else "gloo"),
        timeout=timeout,
        threads=threads or max(1, (os.cpu_count() or 1) // nproc),
    )
    run = _Run(stop_grace)
    try:
        with run.forwarding_signals():
            for rank in range(nproc):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, args=(theirs, setting, rank, call))
                process.start()
                theirs.close()
                run.add(process, ours)
            run.collect()
        return run.outcome()
    finally:
        run.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    nproc: int
    rendezvous: str
    device: Device
    backend: str
    timeout: datetime.timedelta | None
    threads: int


def _rank_main(pipe: Connection, setting: _Setting, rank: int, call: Call) -> None:
    die_with_parent()
    torch.set_num_threads(setting.threads)
    try:
        if setting.device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            setting.backend,
            store=_torch.file_store(setting.rendezvous, setting.nproc, prefix="launch"),
            rank=rank,
            world_size=setting.nproc,
            timeout=setting.timeout,
        )
        reply = pickle.dumps((True, call()))
    except BaseException as error:
        reply = pickle.dumps((False, Failure.of(error, rank, setting.nproc)))
        leave_world()
    with contextlib.suppress(EOFError, OSError):
        pipe.send_bytes(reply)
        # Stay in the world until all have finished: they may still be reading from this rank.
        pipe.recv_bytes()
    leave_world()


class _Run:
    """The parent's view of its ranks: who has answered, and what came as a signal."""

    def __init__(self, stop_grace: float) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.results: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.signal: int | None = None
        self.deadline = float("inf")
        self.stop_grace = stop_grace

    def add(self, process: Any, pipe: Connection) -> None:
        self.processes.append(process)
        self.pipes.append(pipe)
        if self.signal is not None:  # it came while the processes were being started
            os.kill(process.pid, self.signal)

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can have handlers
            return
        before = {number: signal.signal(number, self._forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = self.signal or number
        self.deadline = 0.0 if again else min(self.deadline, time.monotonic() + self.stop_grace)
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def collect(self) -> None:
        """Wait for every rank's answer, or until the rest has been given long enough."""
        waiting = set(range(len(self.pipes)))
        while waiting and time.monotonic() < self.deadline:
            ranks = {self.pipes[rank]: rank for rank in waiting}
            # Short waits: a signal handler may have moved the deadline.
            for pipe in connection.wait(list(ranks), timeout=0.2):
                rank = ranks[pipe]  # type: ignore[index]
                waiting.discard(rank)
                self._receive(rank)
            if any(not failure.lost for failure in self.failures) and self.signal is None:
                return
            if self.failures:
                self.deadline = min(self.deadline, time.monotonic() + _NOTICE)

    def _receive(self, rank: int) -> None:
        try:
            succeeded, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            process, size = self.processes[rank], len(self.processes)
            process.join(1.0)
            died = RankDiedError(f"rank {rank} of {size} died ({how_ended(process.exitcode)})")
            # Killed by the signal that was passed on: no fault of its own.
            by_signal = self.signal is not None and process.exitcode == -self.signal
            self.failures.append(Failure.of(died, rank, size, lost=by_signal))
            return
        if succeeded:
            self.results[rank] = value
        else:
            interrupted = self.signal is not None and value.summary.startswith("KeyboardInterrupt")
            self.failures.append(value.excused() if interrupted else value)

    def outcome(self) -> list[Any]:
        """Return the results of all ranks, or raise what kept them from being complete."""
        size = len(self.processes)
        if len(self.results) == size:
            return [self.results[rank] for rank in range(size)]
        if self.failures and (self.signal is None or not first_real(self.failures).lost):
            raise first_real(self.failures).exception()
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.signal or signal.SIGTERM))

    def end(self) -> None:
        """Let finished ranks go, end the others, and wait until none is left."""
        for pipe in self.pipes:
            pipe.close()
        unfinished = [p for r, p in enumerate(self.processes) if r not in self.results]
        for process in unfinished:
            process.terminate()
        limit = time.monotonic() + (_KILL if self.deadline else 0.0)
        for process in self.processes:
            process.join(max(0.0, limit - time.monotonic()))
        for process in self.processes:
            kill_tree(process.pid)
            process.join()
            process.close()

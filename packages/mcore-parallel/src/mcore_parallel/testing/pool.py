"""`RankPool`: worker processes that become the ranks of one world after another."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mcore_parallel._call import Call, warning_filters
from mcore_parallel._failure import Failure, RankDiedError, first_real, how_ended
from mcore_parallel._process import kill_tree
from mcore_parallel.testing._worker import LEAVE, Job, serve

_FRAMES = 12  # innermost frames of a rank that hangs
_START = 120.0  # seconds that workers may take to start
_GRACE = 5.0  # seconds that the other ranks have to notice that one has failed
_THREADS = 120  # of a worker: gloo has three for each group, of which one wakes 100 times a second


class RankHungError(TimeoutError):
    """A job did not end in time."""


@dataclass(frozen=True, kw_only=True)
class _Worker:
    process: Any
    pipe: Connection
    stacks: Path


def _crowded(worker: _Worker) -> bool:
    """Whether groups of earlier jobs, which torch or a test kept, take too much of the machine."""
    try:
        return len(os.listdir(f"/proc/{worker.process.pid}/task")) > _THREADS
    except OSError:  # only Linux tells
        return False


class RankPool:
    """Processes on this machine that run functions as the ranks of a gloo world.

    Workers start when they are first needed (forkserver, torch preloaded) and stay, until groups
    that earlier jobs did not let go of crowd them; every job gets a new world of the first n.
    `close()` ends them, as does leaving the `with` block. Modules named in `preload` are imported
    once, before the workers are forked.
    """

    def __init__(self, max_ranks: int = 8, *, preload: Sequence[str] = ()) -> None:
        self.max_ranks = max_ranks
        self.preload = tuple(preload)
        self._workers: list[_Worker] = []
        self._jobs = itertools.count()
        self._busy: set[int] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="mcore-ranks-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60,
        device: str = "cpu",
        **kwargs: Any,
    ) -> list[Any]:
        """Return `[fn(*args, **kwargs) on rank 0, …]` of a new world of `world_size` ranks.

        `fn` is a function at the top level of its module; arguments and results are pickled. It
        finds torch.distributed initialised (gloo; with device "cuda" also NCCL, rank r on GPU r),
        one thread, a fixed seed, and the warning filters of the caller. After `timeout` seconds
        RankHungError shows where each late rank stands; RankDiedError names a rank that ended. An
        exception of `fn` is raised here with its own type and a note that names the rank: the first
        that is not merely the loss of another rank. ValueError when the pool has too few ranks.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(
                f"a world of {world_size} ranks: this pool has 1 to {self.max_ranks} of them"
            )
        number = next(self._jobs)
        call = Call.of(fn, args, kwargs)
        self._start(world_size)
        filters = warning_filters()
        for rank in range(world_size):
            job = Job(
                number=number,
                call=call,
                rank=rank,
                world_size=world_size,
                rendezvous=str(self._folder / f"world{number}"),
                device=device,
                timeout=timeout,
                filters=filters,
            )
            self._busy.add(rank)
            with contextlib.suppress(OSError):  # a dead worker is noticed below
                self._workers[rank].pipe.send_bytes(pickle.dumps(job))
        try:
            return self._collect(number, world_size, timeout)
        finally:
            if self._busy:
                self._kill()

    def _collect(self, number: int, size: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + timeout
        died = False
        while self._busy and not died:
            ranks = {self._workers[rank].pipe: rank for rank in self._busy}
            ready = connection.wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise self._hung(size, timeout)
            for pipe in ready:
                rank = ranks[pipe]  # type: ignore[index]
                reply = self._receive(rank, size)
                if isinstance(reply, RankDiedError):
                    failures.append(Failure.of(reply, rank, size))
                    died = True
                    continue
                self._busy.discard(rank)
                answered, succeeded, value = reply
                assert answered == number, "a worker answered an earlier job"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(value)
                    deadline = min(deadline, time.monotonic() + _GRACE)
                    self._leave(results)
        self._leave(results)
        if failures:
            raise first_real(failures).exception()
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(1.0)
        self._kill()

    def _start(self, count: int) -> None:
        if any(not worker.process.is_alive() or _crowded(worker) for worker in self._workers):
            self._kill()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mcore_parallel.testing._worker", *self.preload])
        started: list[_Worker] = []
        while len(self._workers) < count:
            stacks = self._folder / f"stacks{len(self._workers)}"
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process=process, pipe=ours, stacks=stacks))
            started.append(self._workers[-1])
        # Imports take seconds on a busy machine; the time of the job starts after them.
        limit = time.monotonic() + _START
        for worker in started:
            if not worker.pipe.poll(max(0.0, limit - time.monotonic())):
                self._kill()
                raise RankHungError(f"a worker process did not start within {_START:g} s")
            try:
                worker.pipe.recv_bytes()
            except EOFError:
                worker.process.join(1.0)
                how = how_ended(worker.process.exitcode)
                self._kill()
                raise RankDiedError(f"a worker process died ({how}) while it started") from None

    def _leave(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._workers[rank].pipe.send_bytes(LEAVE)

    def _receive(self, rank: int, size: int) -> Any:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(1.0)
            how = how_ended(worker.process.exitcode)
            return RankDiedError(f"rank {rank} of {size} died ({how}) in the middle of its job")

    def _hung(self, size: int, timeout: float) -> RankHungError:
        late = sorted(self._busy)
        names = ", ".join(map(str, late))
        error = RankHungError(
            f"rank{'s' * (len(late) > 1)} {names} of {size} did not finish within {timeout:g} s"
        )
        for rank in late:
            os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        for rank in late:
            stack = self._workers[rank].stacks.read_text(encoding="utf-8").splitlines()
            error.add_note("\n".join([f"rank {rank} of {size} stands at:", *stack[1:_FRAMES]]))
        return error

    def _kill(self) -> None:
        for worker in self._workers:
            kill_tree(worker.process.pid)
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()
        self._busy.clear()

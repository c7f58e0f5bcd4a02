"""Map a function over items in worker processes: in order, bounded, loud when a worker dies."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 8  # results per worker that may wait for an earlier one


def _serve(connection: Connection, function: Callable[[T], R]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    # One core each: libraries with threads of their own would start as many in every worker.
    os.environ.update(dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS"), "1"))
    with contextlib.suppress(EOFError, OSError):  # the parent has closed its end
        while True:
            item = connection.recv()
            try:
                result: R | Exception = function(item)
            except Exception as error:
                result = error
            connection.send(result)


def ordered_map(function: Callable[[T], R], items: Iterable[T], *, workers: int = 1) -> Iterator[R]:
    """Yield `function(item)` for every item, in order.

    With more than one worker the calls run in that many fresh processes (`function` must be
    picklable, and a script needs its `if __name__ == "__main__"`). Items are drawn only as
    fast as results are taken. An exception of `function` is raised here; a process that dies
    raises ChildProcessError.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(theirs, function), daemon=True
            )
            process.start()
            theirs.close()
            processes[ours] = process
        yield from _exchange(processes, iter(items))
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
        for process in processes.values():
            process.join()


def _exchange(processes: dict[Connection, BaseProcess], items: Iterator[T]) -> Iterator[R]:
    """Hand one item at a time to each idle worker, so that neither end ever blocks in a send."""
    idle = list(processes)
    busy: dict[Connection, int] = {}
    done: dict[int, R] = {}
    sent = taken = 0
    exhausted = False
    while True:
        while idle and not exhausted and sent - taken < _AHEAD * len(processes):
            try:
                item = next(items)
            except StopIteration:
                exhausted = True
                break
            connection = idle.pop()
            try:
                connection.send(item)
            except OSError:
                raise _death(processes[connection]) from None
            busy[connection] = sent
            sent += 1
        if taken in done:
            yield done.pop(taken)
            taken += 1
        elif busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                try:
                    result = ready.recv()
                except (EOFError, OSError):
                    raise _death(processes[ready]) from None
                if isinstance(result, Exception):
                    raise result
                done[busy.pop(ready)] = result
                idle.append(ready)
        else:
            return


def _death(process: BaseProcess) -> ChildProcessError:
    process.join(5)
    return ChildProcessError(f"worker process {process.pid} died (exit code {process.exitcode})")

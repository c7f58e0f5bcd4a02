"""Work for several threads, a little at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 8  # items for each thread: enough that none waits for one that is slow


def map_in_threads(
    run: Callable[[T], R], items: Iterable[T], num_threads: int, name: str
) -> Iterator[R]:
    """Yield `run(item)` for each item in turn.

    Items are taken as the results are: there may be any number of them. After an error or an
    interrupt no more are begun. name: of the threads.
    """
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix=name) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(run, item))
                if len(waiting) > _AHEAD * num_threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

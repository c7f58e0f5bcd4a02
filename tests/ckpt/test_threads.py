"""Work for several threads: in order, a few items ahead, and none after an error."""

import itertools
import time

import pytest

from mcore_ckpt.threads import map_in_threads


def test_results_come_in_order_and_few_items_are_taken_ahead() -> None:
    taken = itertools.count()
    squares = map_in_threads(lambda n: (time.sleep(0.002 * (n % 3)), n * n)[1], taken, 2, "test")
    assert list(itertools.islice(squares, 100)) == [n * n for n in range(100)]
    assert next(taken) <= 100 + 2 * 9
    squares.close()  # type: ignore[attr-defined]  # a generator
    assert list(map_in_threads(str, range(3), 8, "test")) == ["0", "1", "2"]


def test_after_an_error_no_more_are_begun() -> None:
    begun = []

    def run(n: int) -> int:
        begun.append(n)
        time.sleep(0.005)
        if n == 3:
            raise OSError("this one")
        return n

    with pytest.raises(OSError, match="this one"):
        list(map_in_threads(run, itertools.count(), 1, "test"))
    assert len(begun) <= 3 + 9
    count = len(begun)
    time.sleep(0.02)
    assert len(begun) == count

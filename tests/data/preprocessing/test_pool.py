import math
import os

import pytest

from mcore_data.preprocessing.pool import ordered_map


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_items_are_drawn_as_needed(workers):
    drawn = []

    def items():
        for i in range(60):
            drawn.append(i)
            # Alternately heavy and light, so that later ones finish first.
            yield 3000 if i % 7 == 0 else i

    expected = [math.factorial(3000 if i % 7 == 0 else i) for i in range(60)]
    for i, result in enumerate(ordered_map(math.factorial, items(), workers=workers)):
        assert result == expected[i]
        assert len(drawn) <= i + 1 + 8 * workers
    assert len(drawn) == 60


def test_faults_are_raised_here():
    for workers in (1, 2):
        with pytest.raises(ValueError, match="invalid literal"):
            list(ordered_map(int, ["1", "x"], workers=workers))
    with pytest.raises(ChildProcessError, match=r"worker process \d+ died \(exit code 3\)"):
        list(ordered_map(os._exit, [3, 3, 3], workers=2))

    def items():
        yield 1
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        list(ordered_map(abs, items(), workers=2))
    assert list(ordered_map(abs, [], workers=2)) == []

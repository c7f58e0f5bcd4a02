"""The pytest fixture `ranks`; a `conftest.py` imports it: `from …plugin import ranks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_parallel.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Yield the pool of gloo ranks of this test session."""
    with RankPool(preload=["pytest"]) as pool:
        yield pool

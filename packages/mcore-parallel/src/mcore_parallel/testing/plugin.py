"""The pytest fixture `ranks`; a `conftest.py` imports it: `from …plugin import ranks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_parallel.testing.pool import RankPool

# What tests use in every worker and is slow to import; torch.testing.assert_close needs the second.
_PRELOAD = ("pytest", "torch.distributed.tensor")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Yield the pool of gloo ranks of this test session."""
    with RankPool(preload=_PRELOAD) as pool:
        yield pool

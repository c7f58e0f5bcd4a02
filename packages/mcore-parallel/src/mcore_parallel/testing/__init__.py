"""A pool of gloo ranks for tests, here and downstream.

`RankPool.run(fn, world_size, *args)` calls a function on every rank of a fresh world; processes are
started once. `mcore_parallel.testing.plugin` has the pytest fixture `ranks`.
"""

from mcore_parallel._failure import RankDiedError
from mcore_parallel.testing.pool import RankHungError, RankPool

__all__ = ["RankDiedError", "RankHungError", "RankPool"]

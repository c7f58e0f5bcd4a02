"""The pool of ranks of this test session."""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import torch

from mcore_parallel.testing import RankPool

# Imported once, before the workers are forked: importing them in each of sixteen costs minutes.
# torch.testing.assert_close needs torch.distributed.tensor, sharded parameters torch._dynamo.
PRELOAD = (
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo",
    "mcore_parallel.data.fully",
    "mcore_train.parity",
    "mcore_inference",
    "mcore_rl",
)

# Commands that tests start keep what they compile: without it, importing torch takes each of them
# three times as long.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside another worker of pytest, a command with a thread for each core would mostly wait for
    # its own threads.
    os.environ["OMP_NUM_THREADS"] = "1"
    # A process forks from one server, and `launch_local` would start one that has imported less.
    multiprocessing.set_forkserver_preload(["mcore_parallel.testing._worker", *PRELOAD])
    forkserver.ensure_running()

# As in the ranks: sums over threads are taken in another order, and some comparisons are bitwise.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Let `--dist loadfile` keep the order below; its own puts files of few tests last."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have slow tests, so that two workers end at the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Yield the pool of gloo ranks of this test session."""
    with RankPool(max_ranks=16, preload=PRELOAD) as pool:
        yield pool

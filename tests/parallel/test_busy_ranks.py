"""A rank dies in a larger group: nobody takes those for dead who wait for others, or are busy."""

import datetime
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_parallel import CollectiveError, ParallelConfig, ParallelMesh
from mcore_parallel._call import Call
from mcore_parallel.collectives import all_reduce
from mcore_parallel.testing import RankPool

SIZE, VICTIM, BUSY = 4, 2, 0


def train(rank: int, port: int, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=limit)
    mesh = ParallelMesh.create(ParallelConfig(dp=SIZE))
    assert mesh is not None
    x = all_reduce(torch.ones(8), mesh.dp)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == BUSY:
        time.sleep(2)  # longer than the others listen for reports
    try:
        all_reduce(x, mesh.dp)
    except CollectiveError as error:
        Path(folder, f"rank{rank}").write_text(str(error))


def test_only_the_dead_rank_is_named(tmp_path: Path, ranks: RankPool) -> None:
    """Of a ring only its neighbours see that it is gone; one rank is not even in the collective."""
    ranks.run(dist.get_rank, 1)  # the server that forks processes has imported torch by now
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=Call.of(train, (rank, store.port, str(tmp_path)), {}))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank in range(SIZE):
        if rank != VICTIM:
            assert (tmp_path / f"rank{rank}").read_text() == (
                f"rank {rank}, all_reduce over dp (ranks 0, 1, 2, 3): connection closed: "
                f"rank {VICTIM} is gone"
            )

import time

import torch
import torch.distributed as dist

from mcore_parallel.collectives import all_gather
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.testing import RankPool

NAMES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp", "replica", "embedding", "world")


def reached(text: str) -> dict[str, list[int]]:
    started = time.perf_counter()
    mesh = ParallelMesh.create(ParallelConfig.parse(text))
    print(dist.get_rank(), "create", time.perf_counter() - started)
    assert mesh is not None
    me = torch.tensor([dist.get_rank()])
    found = {name: all_gather(me, getattr(mesh, name)).tolist() for name in NAMES}
    expected = ParallelMesh.arithmetic(
        mesh.config, world_size=dist.get_world_size(), rank=mesh.rank
    )
    assert found == {name: list(getattr(expected, name).ranks) for name in NAMES}
    mesh.close()
    return found


def test_groups_reach_the_ranks_that_arithmetic_says(ranks: RankPool) -> None:
    assert ranks.run(reached, 4, "tp=2,pp=2")[3]["pp"] == [1, 3]
    assert ranks.run(reached, 4, "tp=2 ep=4 etp=1")[3]["ep"] == [0, 1, 2, 3]
    assert ranks.run(reached, 4, "cp=2")[3]["cp"] == [2, 3]

"""Train a plain nn.Module with our mesh, gradient buckets and sharded optimizer, and nothing else.

python examples/own_model.py            # one process
python examples/own_model.py 2          # two data-parallel processes, the same losses
python examples/own_model.py 2 zero=3   # each holds half of gradients, state and parameters
"""

import sys

import torch
from torch import nn

from mcore_parallel import (
    SGD,
    ParallelConfig,
    ParallelMesh,
    ShardedOptimizer,
    all_reduce,
    data_parallel,
    launch_local,
    param_specs,
)


def train(layout: str) -> list[float]:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = data_parallel(model, specs, mesh, units=[model[0], model[2]])
    optimizer = ShardedOptimizer(buckets, SGD(momentum=0.9))
    inputs = torch.randn(64, 8)
    targets = inputs.sin().sum(1, keepdim=True)
    mine = slice(mesh.dp.rank, None, mesh.dp.size)  # this rank's samples
    losses = []
    for _ in range(20):
        buckets.zero()
        # A sum divided by the global count: gradients add up over ranks, never average.
        loss = (model(inputs[mine]) - targets[mine]).square().sum() / len(inputs)
        loss.backward()
        buckets.finish()
        optimizer.step(lr=0.05)
        losses.append(float(all_reduce(loss.detach(), mesh.world)))
    mesh.close()
    return losses


if __name__ == "__main__":
    nproc = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    layout = " ".join(sys.argv[2:])
    losses = launch_local(train, nproc, layout)[0]
    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")

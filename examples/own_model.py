"""Train a plain nn.Module with our mesh, gradient buckets and sharded optimizer, and nothing else.

python examples/own_model.py        # one process
python examples/own_model.py 2      # two data-parallel processes, the same losses
"""

import sys

import torch
from torch import nn

from mcore_parallel import (
    SGD,
    GradientBuckets,
    ParallelConfig,
    ParallelMesh,
    ShardedOptimizer,
    all_reduce,
    launch_local,
    param_specs,
)


def train() -> list[float]:
    mesh = ParallelMesh.create(ParallelConfig())
    assert mesh is not None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = GradientBuckets(dict(model.named_parameters()), specs, mesh)
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
    losses = launch_local(train, nproc)[0]
    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")

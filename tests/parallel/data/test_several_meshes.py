"""Models of different layouts over different ranks, trained in turn in the same processes."""

import pytest
import torch
from torch import nn

from mcore_parallel import SGD, ParallelConfig, ParallelMesh, param_specs
from mcore_parallel.data import ShardedOptimizer, clip_factor, data_parallel
from mcore_parallel.layout import gather_all

STEPS = 2
# Fully sharded over two ranks, over all with copies, and over the other two; then two of one shape.
MESHES = [
    [("zero=3", [2, 0]), ("zero=3 replicas=2", [3, 1, 2, 0]), ("zero=2", [1, 3])],
    [
        ("zero=3 cp=2 replicas=2", [0, 2, 1, 3]),
        ("zero=3 cp=2 replicas=2 order=cp-dp", [3, 2, 1, 0]),
    ],
]


class Trainer:
    def __init__(self, mesh):
        torch.manual_seed(0)
        self.mesh, self.norms = mesh, []
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        specs = param_specs(self.model, tp=mesh.tp, sequence_parallel=False)
        units = [self.model[0], self.model[2]]
        self.buckets = data_parallel(self.model, specs, mesh, units=units)
        self.optimizer = ShardedOptimizer(self.buckets, SGD(momentum=0.9))

    def step(self, x):
        mesh = self.mesh
        mine = x[mesh.dp.rank * mesh.cp.size + mesh.cp.rank :: mesh.dp.size * mesh.cp.size]
        self.buckets.zero()
        self.model(mine).square().sum().backward()
        self.buckets.finish()
        self.norms.append(self.optimizer.grad_norm())
        self.optimizer.step(0.01, grad_scale=clip_factor(self.norms[-1], 1.0))


def train_in_turn(meshes):
    made = [ParallelMesh.create(ParallelConfig.parse(text), ranks=ranks) for text, ranks in meshes]
    trainers = [Trainer(mesh) if mesh is not None else None for mesh in made]
    for x in torch.randn(STEPS, 12, 5, generator=torch.Generator().manual_seed(1)):
        for trainer in trainers:
            if trainer is not None:
                trainer.step(x)
    results = []
    for trainer in trainers:
        if trainer is None:
            results.append(None)
            continue
        state = gather_all(trainer.optimizer.state_tensors(), trainer.mesh.world)
        results.append((trainer.norms, state))
        trainer.mesh.close()  # the others go on
    return results


@pytest.mark.parametrize("meshes", MESHES)
def test_each_equals_one_process(ranks, meshes):
    ((norms, state),) = train_in_turn([("", [0])])
    found = ranks.run(train_in_turn, 4, meshes)
    for index, (_, members) in enumerate(meshes):
        for rank in range(4):
            assert (found[rank][index] is None) == (rank not in members)
        for rank in members:
            assert found[rank][index][0] == found[members[0]][index][0]
        torch.testing.assert_close(found[members[0]][index], (norms, state), rtol=1e-5, atol=1e-6)

"""Gradients of tensor-parallel layers through buckets and the sharded optimizer, in fp64."""

import pytest
import torch
from torch import nn

from mcore_parallel import Group, Init, RngKey, initialise, param_specs
from mcore_parallel.config import ParallelConfig
from mcore_parallel.data import GradientBuckets, ShardedOptimizer
from mcore_parallel.layout import gather_all
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.protocols import SGD
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear

INIT = Init(kind="normal", std=0.5)


class Block(nn.Module):
    """Norm, then 4 query units and one unit that all of them use, then back to the width."""

    def __init__(self, tp, sequence_parallel):
        super().__init__()
        options = {"group": tp, "bias": True, "sequence_parallel": sequence_parallel, "init": INIT}
        self.norm = nn.LayerNorm(6)
        self.qkv = ColumnParallelLinear(6, parts=[Part("q", 4, 2), Part("kv", 1, 2)], **options)
        self.out = RowParallelLinear(8, 6, **options)

    def forward(self, x):
        y = self.qkv(self.norm(x))
        q, kv = y[:, :-2].unflatten(1, (-1, 2)), y[:, None, -2:]
        return x + self.out(torch.tanh(q * kv).flatten(1))


def train(changes):
    """Two steps on eight samples of four tokens."""
    config = ParallelConfig(bucket_size=50, **changes)
    mesh = ParallelMesh.create(config) if Group.world().size > 1 else ParallelMesh.single()
    sp = config.sequence_parallel
    model = nn.Sequential(Block(mesh.tp, sp), Block(mesh.tp, sp)).double()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=sp)
    params = dict(model.named_parameters())
    initialise(params, specs, RngKey(1))
    buckets = GradientBuckets(params, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD(momentum=0.9))
    generator = torch.Generator().manual_seed(2)
    samples = torch.randn(2, 8, 4, 6, generator=generator, dtype=torch.float64)
    seen = []
    for batch in samples:
        buckets.zero()
        mine = batch[mesh.dp.rank :: mesh.dp.size]
        for i, x in enumerate(mine):
            rows = x.chunk(mesh.tp.size)[mesh.tp.rank] if sp else x
            with torch.enable_grad() if i == len(mine) - 1 else buckets.no_sync():
                (model(rows).square().sum() / 8).backward()
        buckets.finish()
        seen += [optimizer.grad_norm(), gather_all(buckets.gradients(), mesh.world)]
        optimizer.step(0.01)
    return *seen, gather_all(optimizer.state_tensors(), mesh.world)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_norm_gradients_and_state_equal_one_process(ranks, tp, sequence_parallel, overlap):
    """tp × dp = 4: every gradient, the norm on every rank, and the state after two steps."""
    expected = train({})
    changes = {"tp": tp, "sequence_parallel": sequence_parallel, "overlap": overlap}
    results = ranks.run(train, 4, changes)
    torch.testing.assert_close(results[0], expected, rtol=1e-10, atol=1e-10)
    assert all(r[0] == results[0][0] and r[2] == results[0][2] for r in results)

"""What each level of sharding keeps: counted in the tensors that are alive."""

import gc
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mcore_parallel import (
    ParallelConfig,
    ParallelMesh,
    RngKey,
    ShardedOptimizer,
    initialise,
    param_specs,
)
from mcore_parallel.data import data_parallel, modules

WIDTH = 64
LAYERS = 4


class TwoMoments:
    state_names = ("exp_avg", "exp_avg_sq")

    def init(self, value):
        return {name: torch.zeros_like(value) for name in self.state_names}

    def update(self, value, grad, state, *, lr, weight_decay, step):
        value.sub_(grad, alpha=lr)


def alive():
    """Bytes of all tensors that this process holds."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and not isinstance(found, DTensor):
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kept(sharding, replicas):
    """What a rank keeps after the first of several backward passes, in sizes of the model."""
    before = alive()
    config = ParallelConfig(sharding=sharding, replicas=replicas, bucket_size=WIDTH * WIDTH)
    mesh = ParallelMesh.create(config)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = data_parallel(model, specs, mesh, units=model)
    optimizer = ShardedOptimizer(buckets, TwoMoments())
    buckets.zero()
    with buckets.no_sync():
        model(torch.ones(1, WIDTH)).sum().backward()
    found = alive() - before
    model(torch.ones(1, WIDTH)).sum().backward()
    buckets.finish()
    optimizer.step(0.1)
    optimizer.wait()
    mesh.close()
    return found / (4 * LAYERS * WIDTH**2)


@pytest.mark.parametrize(
    ("sharding", "replicas", "parts"),
    [
        # parameters, gradients and two moments over four ranks
        ("none", 1, 1 + 1 + 2),
        ("optimizer", 1, 1 + 1 + 2 / 4),
        ("optimizer", 2, 1 + 1 + 2 / 2),
        ("gradients", 1, 1 + (1 / 4 + 1 / LAYERS) + 2 / 4),  # and a bucket on its way
        ("parameters", 1, 1 / 4 + 1 / 4 + 2 / 4),
    ],
)
def test_each_level_keeps_less(ranks, sharding, replicas, parts):
    assert ranks.run(kept, 4, sharding, replicas) == pytest.approx([parts] * 4, rel=0.03)


def cut_from_nothing(key):
    """The most that a rank holds while a model on meta is cut, in sizes of the model."""
    before = alive()
    mesh = ParallelMesh.create(ParallelConfig(sharding="parameters"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(LAYERS)))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    held = []
    cut = modules.fully_shard

    def watched(*args, **options):
        held.append(alive() - before)
        return cut(*args, **options)

    with mock.patch.object(modules, "fully_shard", watched):
        buckets = data_parallel(model, specs, mesh, units=model, key=key)
    found = [param.full_tensor() for param in model.parameters()]
    wanted = {name: torch.zeros(spec.layout.shape) for name, spec in specs.items()}
    initialise(wanted, specs, key)
    same = all(a.equal(b) for a, b in zip(found, wanted.values(), strict=True))
    buckets.close()
    mesh.close()
    return max(held) / (4 * LAYERS * WIDTH**2), same


def test_the_whole_model_is_never_in_memory(ranks):
    """One unit, and the shares of those before it; the values are those of one process."""
    for most, same in ranks.run(cut_from_nothing, 4, RngKey(3)):
        assert most < 1 / LAYERS + 1 / 4 + 0.05
        assert same

"""The norm over every kind of copy, clipping, and values that are not finite."""

import math

import pytest
import torch
from torch import nn

from mcore_parallel import SGD, TensorLayout
from mcore_parallel.config import ParallelConfig
from mcore_parallel.data import (
    GradientBuckets,
    ShardedOptimizer,
    clip_factor,
    data_parallel,
    main_grad,
)
from mcore_parallel.layout import Box, check_tiling, gather_all, gather_layouts
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.spec import GradSync, Init, ParamSpec

ZEROS = Init(kind="zeros")


def make_mesh(**changes):
    settings = {"bucket_size": 80} | changes
    return ParallelMesh.create(ParallelConfig(**settings))


def expert_norm():
    mesh = make_mesh(ep=2)
    box = Box((mesh.ep.rank, 0), (1, 2))
    specs = {
        "experts": ParamSpec(
            layout=TensorLayout.box("experts", (2, 2), box), init=ZEROS, expert=True
        ),
        "shared": ParamSpec(layout=TensorLayout.whole("shared", (2,)), init=ZEROS),
    }
    params = {name: nn.Parameter(torch.zeros(s.layout.shape)) for name, s in specs.items()}
    buckets = GradientBuckets(params, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    norms = []
    for shared in (0.0, 3.0):
        buckets.zero()
        grad = torch.tensor([[2.0, 4.0], [6.0, 8.0]])[mesh.ep.rank]
        ((params["experts"] * grad).sum() + (params["shared"] * shared).sum()).backward()
        buckets.finish()
        norms.append(optimizer.grad_norm())
        optimizer.step(1.0, grad_scale=clip_factor(norms[-1], 1.0))
    return norms, params["shared"].tolist(), params["experts"].tolist()


def test_expert_and_shared_gradients_count_once(ranks):
    """U35: experts {2, 4} and {6, 8} on two ranks have norm 10.954451 on both."""
    first, second = ranks.run(expert_norm, 2)
    assert first[0] == second[0]
    assert first[0][0] == pytest.approx(10.954451)
    assert first[0][1] == pytest.approx(math.sqrt(120 + 2 * 6.0**2))  # 3 on each of two ranks
    assert first[1] == second[1] == pytest.approx([-6.0 / first[0][1]] * 2)


def split_specs(mesh):
    """A matrix cut over tp, one with padding, a replicated bias, kv rows shared by all of tp."""
    tp = mesh.tp
    rows = 8 // tp.size
    box = Box((rows * tp.rank, 0), (rows, 3))
    vocab = Box((4 * tp.rank, 0), (4 if tp.rank < tp.size - 1 or tp.size == 1 else 3, 3))
    part = TensorLayout.box("vocab", (4 * tp.size - (tp.size > 1), 3), vocab)
    padding = TensorLayout.padding((4 - vocab.shape[0], 3))
    q, kv = TensorLayout.box("q", (8, 3), box), TensorLayout.whole("kv", (2, 3))
    sync = (GradSync(group=tp, start=q.numel),)
    return {
        "w": ParamSpec(layout=TensorLayout.box("w", (8, 3), box), init=ZEROS),
        "vocab": ParamSpec(layout=TensorLayout.concat([part, padding]), init=ZEROS),
        "bias": ParamSpec(
            layout=TensorLayout.whole("bias", (5,)).replicated(tp.rank, tp.size), init=ZEROS
        ),
        "qkv": ParamSpec(
            layout=TensorLayout.concat([q, kv.replicated(tp.rank, tp.size)]),
            init=ZEROS,
            grad_sync=sync,
        ),
    }


def split_norm(changes):
    mesh = make_mesh(**changes)
    specs = split_specs(mesh)
    params = {name: nn.Parameter(torch.zeros(s.layout.shape)) for name, s in specs.items()}
    buckets = GradientBuckets(params, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    for name, param in params.items():
        for fragment, view in specs[name].layout.views(main_grad(param)):
            start = sum(fragment.box.start) + 1
            view.copy_(
                torch.arange(start, start + view.numel()).view(view.shape) * (1 + mesh.dp.rank)
            )
    buckets.finish()
    norm = optimizer.grad_norm()
    gathered = gather_all(buckets.gradients(), mesh.world)
    layouts = gather_layouts({k: x.layout for k, x in buckets.gradients().items()}, mesh.world)
    check_tiling(layout for by_key in layouts.values() for layout in by_key.values())
    whole = torch.cat([g.flatten() for g in gathered.values()]).norm() if gathered else 0.0
    return norm, float(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": 1, "sharding": "none"},
        {"tp": 1, "sharding": "gradients", "replicas": 2},
        {"tp": 2, "sharding": "optimizer"},
        {"tp": 2, "sharding": "gradients"},
        {"tp": 4, "sharding": "optimizer"},
        {"cp": 2, "dp": 2, "sharding": "optimizer", "replicas": 2},
    ],
)
def test_the_norm_is_that_of_the_gathered_gradient(ranks, changes):
    results = ranks.run(split_norm, 4, changes)
    assert len({norm for norm, _ in results}) == 1
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-6)


class Given(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(100)))

    def forward(self, grads):
        pairs = zip(self.parameters(), grads, strict=True)
        return torch.stack([(param * grad).sum() for param, grad in pairs]).sum()


def find_bad(kind, sharding):
    mesh = make_mesh(pp=2, sharding=sharding)
    names = [f"w{i}" for i in range(3)]
    specs = {
        name: ParamSpec(
            layout=TensorLayout.whole(f"layers.{mesh.pp.rank}.{name}", (100,)), init=ZEROS
        )
        for name in names
    }
    model = Given(names)
    buckets = data_parallel(model, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    grads = torch.zeros(3, 100)
    if kind is not None and mesh.world.rank == 3:
        grads[1, 70:73] = kind
        grads[2, 0] = kind
    if kind is not None and mesh.world.rank == 2:
        grads[2, 1] = kind
    buckets.zero()
    model(grads).backward()
    buckets.finish()
    return optimizer.grad_norm(), optimizer.find_nonfinite()


@pytest.mark.parametrize(
    ("kind", "sharding", "place"),
    [
        (math.nan, "none", "3 of 100 values on rank 2"),  # whole on both ranks of the stage
        (math.inf, "optimizer", "3 of 36 values on rank 3"),  # from element 64 of a bucket of 128
        (math.nan, "gradients", "3 of 36 values on rank 3"),
        (-math.inf, "parameters", "3 of 50 values on rank 3"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named_on_all_ranks(ranks, kind, sharding, place):
    results = ranks.run(find_bad, 4, kind, sharding)
    assert not any(math.isfinite(norm) for norm, _ in results)
    (found,) = {bad for _, bad in results}
    assert (found.name, found.count) == ("layers.1.w1", 3)
    assert str(found) == f"layers.1.w1: {place} not finite"


def bad_copy(sharding, kind):
    mesh = make_mesh(tp=2, sharding=sharding)
    whole = TensorLayout.whole("norm.weight", (100,)).replicated(mesh.tp.rank, mesh.tp.size)
    model = Given(["weight"])
    buckets = data_parallel(model, {"weight": ParamSpec(layout=whole, init=ZEROS)}, mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    grads = torch.ones(1, 100)
    if mesh.world.rank == 3:
        grads[0, 70] = kind
    buckets.zero()
    model(grads).backward()
    buckets.finish()
    return optimizer.grad_norm(), optimizer.find_nonfinite()


@pytest.mark.parametrize(
    ("sharding", "kind"), [("none", math.nan), ("optimizer", math.inf), ("parameters", math.nan)]
)
def test_a_copy_that_does_not_count_is_seen_when_it_is_not_finite(ranks, sharding, kind):
    """Two tensor-parallel ranks that should hold the same, of which the second one is wrong."""
    results = ranks.run(bad_copy, 4, sharding, kind)
    assert not any(math.isfinite(norm) for norm, _ in results)
    assert {bad.name for _, bad in results} == {"norm.weight"}
    assert ranks.run(bad_copy, 4, sharding, 1.0) == [(20.0, None)] * 4


def test_nothing_is_named_when_all_is_finite(ranks):
    assert ranks.run(find_bad, 4, None, "optimizer") == [(0.0, None)] * 4


def test_clip_factor():
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == 1.0
    for largest in (0.0, math.nan):
        with pytest.raises(ValueError, match=f"must be positive, not {largest}"):
            clip_factor(1.0, largest)

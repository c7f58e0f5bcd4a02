"""The norm over every kind of copy, clipping, and values that are not finite."""

import math

import pytest
import torch
from torch import nn

from mcore_parallel import SGD, TensorLayout
from mcore_parallel.config import ParallelConfig
from mcore_parallel.data import GradientBuckets, ShardedOptimizer, clip_factor
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
        for fragment, view in specs[name].layout.views(param.main_grad):
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


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("changes", [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"cp": 2, "dp": 2}])
def test_the_norm_is_that_of_the_gathered_gradient(ranks, changes, shard):
    results = ranks.run(split_norm, 4, changes | {"sharding": "optimizer" if shard else "none"})
    assert len({norm for norm, _ in results}) == 1
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-6)


def find_bad(kind):
    mesh = make_mesh(pp=2)
    name = f"layers.{mesh.pp.rank}.w"
    specs = {
        f"{name}{i}": ParamSpec(layout=TensorLayout.whole(f"{name}{i}", (100,)), init=ZEROS)
        for i in range(3)
    }
    params = {name: nn.Parameter(torch.zeros(100)) for name in specs}
    buckets = GradientBuckets(params, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD())
    if kind is not None:
        if mesh.world.rank == 3:
            params[f"{name}1"].main_grad[70:73] = kind
            params[f"{name}2"].main_grad[0] = kind
        if mesh.world.rank == 2:
            params[f"{name}2"].main_grad[1] = kind
    buckets.finish()
    return optimizer.grad_norm(), optimizer.find_nonfinite()


@pytest.mark.parametrize("kind", [math.nan, math.inf, -math.inf])
def test_the_first_tensor_that_is_not_finite_is_named_on_all_ranks(ranks, kind):
    results = ranks.run(find_bad, 4, kind)
    assert not any(math.isfinite(norm) for norm, _ in results)
    (found,) = {bad for _, bad in results}
    # Rank 2 owns elements 0 to 63 of one bucket of 128, rank 3 the rest.
    assert (found.name, found.rank, found.count) == ("layers.1.w1", 3, 3)
    assert str(found) == "layers.1.w1: 3 of 36 values on rank 3 not finite"


def test_nothing_is_named_when_all_is_finite(ranks):
    assert ranks.run(find_bad, 4, None) == [(0.0, None)] * 4


def test_clip_factor():
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(0.5, 1.0) == clip_factor(0.0, 1.0) == 1.0
    with pytest.raises(ValueError, match="must be positive, not 0"):
        clip_factor(1.0, 0.0)

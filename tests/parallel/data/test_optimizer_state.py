"""State of the sharded optimizer: saved, resharded, resumed; tied copies; a whole pipeline."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mcore_parallel import SGD, Group, TensorLayout, param_specs
from mcore_parallel.config import SHARDINGS, ParallelConfig
from mcore_parallel.data import GradientBuckets, ShardedOptimizer, data_parallel, flat, whole
from mcore_parallel.layout import check_tiling, gather_all, gather_layouts, reshard
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.pipeline import one_f_one_b, run_schedule
from mcore_parallel.spec import GradSync, Init, ParamSpec

ZEROS = Init(kind="zeros")
PARTITIONS = {"flat": flat, "whole": whole}


class Adam:
    state_names = ("exp_avg", "exp_avg_sq")

    def init(self, value):
        return {name: torch.zeros_like(value) for name in self.state_names}

    def update(self, value, grad, state, *, lr, weight_decay, step):
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 0.1)
        square.mul_(0.95).addcmul_(grad, grad, value=0.05)
        root = (square / (1 - 0.95**step)).sqrt_().add_(1e-4)
        value.addcdiv_(mean, root, value=-lr / (1 - 0.9**step))


def make_mesh(ranks=None, **changes):
    settings = {"bucket_size": 500} | changes
    return ParallelMesh.create(ParallelConfig(**settings), ranks=ranks)


# --- changing the number of ranks -------------------------------------------------------


SIZES = [1001, *[3] * 10]
STATE = {"step": 3, "state_names": ["exp_avg", "exp_avg_sq"]}


class Uneven(nn.Module):
    """Parameters of many sizes, and a loss with the gradients that it is given."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for i, n in enumerate(SIZES):
            values = torch.randn(n, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))

    def forward(self, grads):
        pairs = zip(self.parameters(), grads, strict=True)
        return sum((param.float() * grad).sum() for param, grad in pairs)


def uneven(mesh, dtype, partition):
    specs = {
        f"p{i}": ParamSpec(layout=TensorLayout.whole(f"p{i}", (n,)), init=ZEROS)
        for i, n in enumerate(SIZES)
    }
    model = Uneven(dtype)
    buckets = data_parallel(model, specs, mesh, partition=PARTITIONS[partition])
    return model, buckets, ShardedOptimizer(buckets, Adam())


def values_of(model):
    params = [param.detach() for param in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in params]


def step(model, buckets, optimizer, mesh, number):
    generator = torch.Generator().manual_seed(number)
    buckets.zero()
    total = [torch.randn(n, generator=generator) / mesh.dp.size for n in SIZES]
    model(total).backward()
    buckets.finish()
    optimizer.step(0.05)


def change_ranks(before, after, dtype, partition):
    """Train on the first ranks as `before` says, move the state, train on as `after` says.

    before, after: (ranks, sharding, replicas)
    """
    world = Group.world()
    old = make_mesh(ranks=range(before[0]), sharding=before[1], replicas=before[2])
    sources = {}
    if old is not None:
        model, buckets, optimizer = uneven(old, dtype, partition)
        for number in range(3):
            step(model, buckets, optimizer, old, number)
        sources = optimizer.state_tensors()
        assert optimizer.state_dict() == STATE
        layouts = gather_layouts({key: x.layout for key, x in sources.items()}, old.world)
        check_tiling(layout for by_key in layouts.values() for layout in by_key.values())
    new = make_mesh(ranks=range(after[0]), sharding=after[1], replicas=after[2])
    targets = {}
    if new is not None:
        model, buckets, optimizer = uneven(new, dtype, partition)
        for held in buckets.parameters().values():
            held.tensor.fill_(9.0)  # all of it must come from the state
        optimizer.parameters_changed()
        targets = optimizer.state_tensors()
    reshard(sources, targets, world)
    before_and_after = gather_all(sources, world), gather_all(targets, world)
    if new is None:
        return None
    optimizer.load_finished()
    optimizer.load_state_dict(STATE)
    loaded = values_of(model)
    step(model, buckets, optimizer, new, 3)
    optimizer.wait()
    return *before_and_after, loaded, values_of(model)


def train_alone(dtype):
    mesh = ParallelMesh.single()
    model, buckets, optimizer = uneven(mesh, dtype, "flat")
    for number in range(3):
        step(model, buckets, optimizer, mesh, number)
    loaded = values_of(model)
    step(model, buckets, optimizer, mesh, 3)
    return loaded, values_of(model)


@pytest.mark.parametrize(
    ("before", "after", "partition", "dtype"),
    [
        ((3, "optimizer", 1), (2, "optimizer", 1), "flat", torch.float32),
        ((3, "optimizer", 1), (2, "optimizer", 1), "whole", torch.bfloat16),
        ((1, "none", 1), (4, "gradients", 2), "flat", torch.bfloat16),
        ((3, "optimizer", 1), (4, "parameters", 1), "flat", torch.float32),
        ((4, "parameters", 2), (3, "gradients", 1), "flat", torch.bfloat16),
        ((3, "parameters", 1), (2, "none", 1), "flat", torch.float32),
        ((2, "parameters", 1), (3, "parameters", 1), "flat", torch.bfloat16),
    ],
)
def test_state_moves_to_another_number_of_ranks(ranks, before, after, partition, dtype):
    """U44: a 1001-element parameter and ten of size 3, from dp 3 to dp 2: moments are equal.

    The kind: from any level of sharding to any other, and what is trained next is as in one run.
    """
    world = max(before[0], after[0])
    results = ranks.run(change_ranks, world, before, after, dtype, partition)
    saved, moved, _, _ = results[0]
    assert saved.keys() == moved.keys()
    assert len(saved) == 3 * len(SIZES)
    assert all(saved[name].equal(moved[name]) for name in saved)
    loaded, trained = train_alone(dtype)
    rough = (
        {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    )
    for rank in range(after[0]):
        for found, wanted in ((results[rank][2], loaded), (results[rank][3], trained)):
            torch.testing.assert_close(found, wanted, **rough, check_dtype=False)


def resume(dtype, sharding):
    """Stop after three steps and go on in new objects; compare with going straight on."""
    mesh = make_mesh(sharding=sharding)
    model, buckets, optimizer = uneven(mesh, dtype, "flat")
    for number in range(3):
        step(model, buckets, optimizer, mesh, number)
    saved = {key: x.tensor.clone() for key, x in optimizer.state_tensors().items()}
    state = optimizer.state_dict()
    fresh, fresh_buckets, fresh_optimizer = uneven(mesh, dtype, "flat")
    targets = fresh_optimizer.state_tensors()
    for key, tensor in saved.items():
        targets[key].tensor.copy_(tensor)
    fresh_optimizer.load_finished()
    fresh_optimizer.load_state_dict(state)
    for number in range(3, 6):
        step(model, buckets, optimizer, mesh, number)
        step(fresh, fresh_buckets, fresh_optimizer, mesh, number)
    return all(a.equal(b) for a, b in zip(values_of(model), values_of(fresh), strict=True))


@pytest.mark.parametrize(
    ("sharding", "dtype"),
    list(zip(SHARDINGS, [torch.bfloat16, torch.float32] * 2, strict=True)),
)
def test_a_resumed_run_is_bitwise_the_same(ranks, sharding, dtype):
    assert all(ranks.run(resume, 2, dtype, sharding))


def test_small_shards_leave_ranks_without_anything(ranks):
    """One parameter of three elements over four ranks."""
    assert ranks.run(tiny, 4) == [([-6.0, -6.0, -6.0], n) for n in (2, 0, 0, 0)]


def tiny():
    mesh = make_mesh()
    param = nn.Parameter(torch.zeros(3))
    specs = {"w": ParamSpec(layout=TensorLayout.whole("w", (3,)), init=ZEROS)}
    buckets = GradientBuckets({"w": param}, specs, mesh)
    optimizer = ShardedOptimizer(buckets, SGD(momentum=0.5))
    (param * float(mesh.dp.rank)).sum().backward()
    buckets.finish()
    optimizer.step(1.0)
    return param.tolist(), len(optimizer.state_tensors())


def test_state_belongs_to_its_rule():
    _, _, optimizer = uneven(ParallelMesh.single(), torch.float32, "flat")
    optimizer.load_state_dict({"step": 12, "state_names": ["exp_avg", "exp_avg_sq"]})
    assert optimizer.state_dict() == {"step": 12, "state_names": ["exp_avg", "exp_avg_sq"]}
    with pytest.raises(ValueError, match=r"holds \['momentum'\], this rule \(Adam\) needs"):
        optimizer.load_state_dict({"step": 12, "state_names": ["momentum"]})


def test_frozen_parameters_are_saved_but_not_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    mesh = ParallelMesh.single()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    optimizer = ShardedOptimizer(
        GradientBuckets(dict(model.named_parameters()), specs, mesh), Adam()
    )
    keys = set(optimizer.state_tensors())
    assert {"model/0.weight", "model/0.bias", "model/1.weight", "exp_avg/1.weight"} <= keys
    assert "exp_avg/0.weight" not in keys


def test_masters_follow_parameters_that_were_loaded():
    model, buckets, optimizer = uneven(ParallelMesh.single(), torch.bfloat16, "flat")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    optimizer.parameters_changed()
    state = optimizer.state_tensors()
    assert all(bool((x.tensor == 2.0).all()) for k, x in state.items() if k.startswith("model/"))
    buckets.zero()
    buckets.finish()
    optimizer.step(1.0)
    assert all(bool((param == 2.0).all()) for param in model.parameters())


# --- tied parameters --------------------------------------------------------------------


def tied(overlap, shard, steps):
    """On pp 2 × dp 2: a weight on the first and the last stage, between others of other sizes."""
    mesh = make_mesh(pp=2, overlap=overlap, sharding="optimizer" if shard else "none")
    stage = mesh.pp.rank
    layout = TensorLayout.whole("embedding", (70,)).replicated(mesh.embedding.rank, 2)
    specs = {
        f"before{stage}": ParamSpec(layout=TensorLayout.whole(f"b{stage}", (5,)), init=ZEROS),
        "embedding": ParamSpec(
            layout=layout, init=ZEROS, grad_sync=(GradSync(group=mesh.embedding),)
        ),
        f"after{stage}": ParamSpec(
            layout=TensorLayout.whole(f"a{stage}", (300 * stage + 9,)), init=ZEROS
        ),
    }
    params = {name: nn.Parameter(torch.zeros(s.layout.shape)) for name, s in specs.items()}
    buckets = GradientBuckets(params, specs, mesh)
    optimizer = ShardedOptimizer(buckets, Adam())
    grad = [[1.0, 3.0], [5.0, 7.0]][stage][mesh.dp.rank] / mesh.dp.size
    (params["embedding"] * grad).sum().backward()
    buckets.finish()
    mean = buckets.gradients()["grad/embedding"].tensor.unique().tolist()
    norm = optimizer.grad_norm()
    generator = torch.Generator().manual_seed(mesh.world.rank)
    for _ in range(steps):
        buckets.zero()
        sum(
            (p * torch.randn(p.shape, generator=generator)).sum() for p in params.values()
        ).backward()
        buckets.finish()
        optimizer.step(0.1)
    return mean, norm, params["embedding"].detach().clone()


@pytest.mark.parametrize("shard", [True, False])
def test_tied_copies_get_one_gradient_and_stay_equal(ranks, shard):
    """U31: gradients 1, 3 on the first stage and 5, 7 on the last are 8 on all."""
    runs = [ranks.run(tied, 4, overlap, shard, 10) for overlap in (True, False)]
    for mean, norm, weight in itertools.chain(*runs):
        assert mean == [8.0]
        assert norm == pytest.approx(8.0 * 70**0.5)
        assert weight.equal(runs[0][0][2])
        assert weight.count_nonzero() == 70


# --- all together -----------------------------------------------------------------------


class Stage(nn.Module):
    """Half of a model of four layers, with a weight at both ends."""

    def __init__(self, layers, ends):
        super().__init__()
        if ends:
            self.embedding = self.parameter(99, 9, 6)
        self.layers = nn.ParameterDict({str(i): self.parameter(i, 6, 6) for i in layers})

    @staticmethod
    def parameter(seed, *shape):
        generator = torch.Generator().manual_seed(seed)
        return nn.Parameter(0.5 * torch.randn(*shape, generator=generator))

    def forward(self, batch, hidden, first, last):
        tokens, labels, count = batch
        x = self.embedding[tokens] if first else hidden
        for weight in self.layers.values():
            x = x + torch.tanh(x @ weight)
        if not last:
            return x
        losses = nn.functional.cross_entropy(x @ self.embedding.t(), labels, reduction="sum")
        return losses / count


def train_pipeline(overlap):
    mesh = make_mesh(pp=2, overlap=overlap) if Group.world().size > 1 else ParallelMesh.single()
    per_stage = 4 // mesh.pp.size
    layers = range(per_stage * mesh.pp.rank, per_stage * (mesh.pp.rank + 1))
    model = Stage(layers, mesh.is_first_stage or mesh.is_last_stage)
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    ends = mesh.embedding
    specs["embedding"] = ParamSpec(
        layout=specs["embedding"].layout.replicated(ends.rank, ends.size),
        init=ZEROS,
        grad_sync=(GradSync(group=ends),),
    )
    buckets = GradientBuckets(dict(model.named_parameters()), specs, mesh)
    optimizer = ShardedOptimizer(buckets, Adam())
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    for _ in range(3):
        lengths = [3, 7, 5, 2, 4, 1]
        batch = [torch.randint(9, (2, n), generator=generator) for n in lengths]
        mine = [(t, y, sum(lengths)) for t, y in batch[mesh.dp.rank :: mesh.dp.size]]
        buckets.zero()
        out = run_schedule(
            one_f_one_b(mesh.pp.size, len(mine))[mesh.pp.rank],
            lambda micro_batch, hidden: model(
                micro_batch, hidden, mesh.is_first_stage, mesh.is_last_stage
            ),
            mine,
            mesh.pp,
            around=buckets.around,
        )
        buckets.finish()
        losses.append(float(sum(out)))
        norms.append(optimizer.grad_norm())
        optimizer.step(0.01)
    return losses, norms, gather_all(optimizer.state_tensors(), mesh.world)


def test_pipeline_data_parallelism_and_sharding_equal_one_process(ranks):
    """U32, U31: lengths vary, embeddings are tied, pp 2 × dp 2, overlap on and off."""
    losses, norms, state = train_pipeline(False)
    runs = [ranks.run(train_pipeline, 4, overlap) for overlap in (True, False)]
    for results in runs:
        assert [sum(x) for x in zip(*(r[0] for r in results), strict=True)] == pytest.approx(losses)
        for _, found, _ in results:
            assert found == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(results[0][2], state, rtol=1e-4, atol=1e-6)
    on, off = runs
    assert all(on[0][2][name].equal(off[0][2][name]) for name in state)

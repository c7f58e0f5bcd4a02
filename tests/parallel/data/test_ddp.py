"""Gradient buckets: what is summed, when, and over whom."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mcore_parallel import TensorLayout, param_specs
from mcore_parallel.config import SHARDINGS, ParallelConfig
from mcore_parallel.data import (
    GradientBuckets,
    ShardedOptimizer,
    data_parallel,
    main_grad,
    reduction,
)
from mcore_parallel.layout import Box, gather_all
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.pipeline import one_f_one_b, run_schedule
from mcore_parallel.protocols import SGD, TorchLinear
from mcore_parallel.spec import GradSync, Init, ParamSpec
from mcore_parallel.tensor import ColumnParallelLinear, VocabParallelEmbedding

ZEROS = Init(kind="zeros")


def make_mesh(**changes):
    settings = {"bucket_size": 60} | changes
    return ParallelMesh.create(ParallelConfig(**settings))


def buckets_of(model, mesh, **options):
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=mesh.config.sequence_parallel)
    return GradientBuckets(dict(model.named_parameters()), specs, mesh, **options)


# --- accumulation and data parallelism --------------------------------------------------


class Tokens(nn.Module):
    """Loss of a token with value v: v · weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values, tokens):
        return (values * self.weight).sum() / tokens


class Watched(TorchLinear):
    def __init__(self):
        self.calls = []

    def weight_grad(self, dy, x, out=None):
        self.calls.append("add")
        return super().weight_grad(dy, x, out)

    def write_weight_grad(self, dy, x, out):
        self.calls.append("write")
        super().write_weight_grad(dy, x, out)


class Mixed(nn.Module):
    """A table, a layer that adds to the buffer itself, one of torch's, and one that is not used."""

    def __init__(self, linear):
        super().__init__()
        self.table = VocabParallelEmbedding(6, 4, accumulate=True)
        self.inner = ColumnParallelLinear(4, 3, linear=linear)
        self.outer = nn.Linear(3, 2)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape).add(index).cos())

    def forward(self, tokens):
        return self.outer(self.inner(self.table(tokens)).tanh()).square().sum()


def test_what_is_left_of_the_step_before_is_written_over():
    """A buffer full of NaN is as good as one of zeros, for every operator."""
    linear = Watched()
    model = Mixed(linear)
    batches = [torch.tensor([0, 3]), torch.tensor([3, 5])]
    plain = Mixed(TorchLinear())
    sum(plain(tokens) for tokens in batches).backward()
    buckets = buckets_of(model, make_mesh(bucket_size=20))
    for _ in range(2):
        for param in model.parameters():
            main_grad(param).fill_(torch.nan)
        buckets.zero()
        with buckets.no_sync():
            model(batches[0]).backward()
        model(batches[1]).backward()
        buckets.finish()
        assert linear.calls == ["write", "add"]
        linear.calls.clear()
        for name, param in plain.named_parameters():
            found = buckets.gradients()[f"grad/{name}"].tensor.view(param.shape)
            wanted = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(found, wanted, msg=name)


def test_a_gradient_is_zero_until_there_is_one():
    """Asked for at any time, and by whoever knows nothing of blank places."""
    model = nn.Linear(2, 2)
    buckets = buckets_of(model, ParallelMesh.single())
    main_grad(model.weight).fill_(7.0)
    buckets.zero()
    assert not main_grad(model.weight).any()
    main_grad(model.weight).add_(1.0)
    assert (main_grad(model.weight) == 1.0).all()
    buckets.finish()
    assert not buckets.gradients()["grad/bias"].tensor.any()
    assert (buckets.gradients()["grad/weight"].tensor == 1.0).all()


def drop_buckets():
    mesh = make_mesh()
    model = Tokens()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = GradientBuckets(dict(model.named_parameters()), specs, mesh)
    gone = weakref.ref(buckets)
    del buckets
    with pytest.raises(RuntimeError, match="weight arrived after its buckets were dropped"):
        model(torch.ones(1), 1).backward()
    whole = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None and whole() is None


def test_a_model_and_its_buckets_go_when_nobody_holds_them(ranks):
    assert ranks.run(drop_buckets, 1) == [True]


def accumulate(micro_batches_of_rank, tokens, changes=None):
    mesh = make_mesh(**(changes or {}))
    mine = [torch.tensor(values) for values in micro_batches_of_rank[mesh.dp.rank]]
    model = Tokens()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = data_parallel(model, specs, mesh)
    buckets.zero()
    losses = run_schedule(
        one_f_one_b(1, len(mine))[0],
        lambda values, _: model(values, tokens),
        mine,
        mesh.pp,
        around=buckets.around,
    )
    buckets.finish()
    grads = gather_all(buckets.gradients(), mesh.world)
    return sum(float(loss) for loss in losses), grads.get("grad/weight", torch.zeros(0)).tolist()


A, B = [2.0], [1.0, 1.0, 1.0]


@pytest.mark.parametrize("split", [[[A + B]], [[A, B]], [[B, A]], [[A], [B]], [[[]], [A + B]]])
def test_per_token_loss_does_not_depend_on_the_split(ranks, split):
    """U26: one token of loss 2 and three of loss 1 are 1.25, over micro-batches or ranks."""
    results = ranks.run(accumulate, len(split), split, 4)
    assert sum(loss for loss, _ in results) == pytest.approx(1.25)
    assert results[0][1] == pytest.approx([1.25])


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_four_micro_batches_in_a_group_of_one_accumulate_four(ranks, sharding):
    """U34: a shard group of size 1 sums four gradients of 1 to 4, alone and beside a replica."""
    assert accumulate([[[1.0]] * 4], 1, {"sharding": sharding}) == (4.0, [4.0])
    replicas = 1 if sharding == "none" else 2
    two = {"sharding": sharding, "replicas": replicas}
    both = ranks.run(accumulate, 2, [[[1.0]] * 4, [[10.0]] * 4], 1, two)
    assert [loss for loss, _ in both] == [4.0, 40.0]
    assert both[0][1] == [44.0]


@pytest.mark.parametrize("sharding", SHARDINGS[1:])
def test_every_level_accumulates_as_plain_data_parallelism(ranks, sharding):
    """U34, U26: several micro-batches on each of the ranks that share the gradient out."""
    split = [[[1.0], [2.0, 3.0]], [[4.0, 5.0, 6.0], [7.0]], [[8.0], [9.0]]]
    plain = ranks.run(accumulate, 3, split, 9, {"sharding": "none"})
    assert plain[0][1] == pytest.approx([5.0])
    assert ranks.run(accumulate, 3, split, 9, {"sharding": sharding}) == plain


# --- overlap ----------------------------------------------------------------------------


class Reordered(nn.Module):
    """Registered a, b, c; used a, c, b. `b` is skipped for some inputs."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name in "abc":
            layer = nn.Linear(8, 8)
            with torch.no_grad():
                for param in layer.parameters():
                    param.copy_(0.5 * torch.randn(param.shape, generator=generator))
            setattr(self, name, layer)

    def forward(self, x, skip):
        x = torch.tanh(self.c(torch.tanh(self.a(x))))
        return (x if skip else torch.tanh(self.b(x))).square().sum()


def train_reordered(overlap, sharding, skipping_rank, lazy):
    mesh = make_mesh(overlap=overlap, sharding=sharding)
    model = Reordered()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = data_parallel(model, specs, mesh, units=model.children())
    assert len(buckets.shares) >= 3
    optimizer = ShardedOptimizer(buckets, SGD(momentum=0.5))
    if lazy:
        optimizer.gather_on_use(model.children())
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        everyone = torch.randn(mesh.dp.size, 2, 4, 8, generator=generator)
        first, last = everyone[mesh.dp.rank]
        skip = mesh.dp.rank == skipping_rank
        buckets.zero()
        with buckets.no_sync():
            model(first, skip).backward()
        model(last, skip).backward()
        buckets.finish()
        optimizer.step(0.01)
    optimizer.wait()
    return whole_values(model)


def whole_values(model):
    params = [param.detach() for param in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in params]


def train_reordered_alone(world, skipping_rank):
    model = Reordered()
    moving = [torch.zeros_like(param) for param in model.parameters()]
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        model.zero_grad()
        for rank, batches in enumerate(torch.randn(world, 2, 4, 8, generator=generator)):
            for x in batches:
                model(x, rank == skipping_rank).backward()
        with torch.no_grad():
            for param, average in zip(model.parameters(), moving, strict=True):
                average.mul_(0.5).add_(param.grad)
                param.sub_(average, alpha=0.01)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("sharding", "world", "skipping_rank"),
    [
        *itertools.product(["none", "optimizer", "gradients"], [3], [1]),
        *itertools.product(["optimizer", "parameters"], [2], [None]),
    ],
)
def test_order_of_use_and_overlap_change_nothing(ranks, sharding, world, skipping_rank):
    """U33: parameters used in another order than registered, and unused ones on one rank."""
    off = ranks.run(train_reordered, world, False, sharding, skipping_rank, False)
    alone = train_reordered_alone(world, skipping_rank)
    torch.testing.assert_close(off[0], alone, rtol=1e-5, atol=1e-6)
    for lazy in (False, True):
        on = ranks.run(train_reordered, world, True, sharding, skipping_rank, lazy)
        for params in (*on, *off):
            assert all(a.equal(b) for a, b in zip(params, off[0], strict=True))


def watch_reductions(overlap):
    mesh = make_mesh(overlap=overlap)
    model = Reordered()
    buckets = buckets_of(model, mesh)
    log = []
    start = reduction.reduce_scatter_into

    def recorded(out, x, group):
        log.append("reduce")
        return start(out, x, group)

    reduction.reduce_scatter_into = recorded
    try:
        model.a.register_full_backward_hook(lambda *_: log.append("a"))
        model.c.register_full_backward_hook(lambda *_: log.append("c"))
        buckets.zero()
        with buckets.no_sync():
            model(torch.ones(2, 8, requires_grad=True), False).backward()
        log.append("no sync")
        model(torch.ones(2, 8, requires_grad=True), False).backward()
        log.append("finish")
        buckets.finish()
    finally:
        reduction.reduce_scatter_into = start
    return log


def test_reductions_run_inside_the_last_backward(ranks):
    on, off = (ranks.run(watch_reductions, 2, overlap)[0] for overlap in (True, False))
    assert on.count("reduce") == off.count("reduce") >= 3
    assert "reduce" not in on[: on.index("no sync")]
    assert on.index("reduce") < on.index("a", on.index("no sync"))  # before backward ended
    assert "reduce" not in on[on.index("finish") :]
    assert "reduce" not in off[: off.index("finish")]


# --- precision, and layers that accumulate themselves -----------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_summed_in_fp32(dtype):
    param = nn.Parameter(torch.ones(2, dtype=dtype))
    specs = {"w": ParamSpec(layout=TensorLayout.whole("w", (2,)), init=ZEROS)}
    buckets = GradientBuckets({"w": param}, specs, ParallelMesh.single())
    with buckets.no_sync():
        for value in (2048.0, *[1.0] * 7):
            (param * value).sum().backward()
    buckets.finish()
    assert param.grad is None
    assert buckets.gradients()["grad/w"].tensor.tolist() == [2055.0, 2055.0]


class AddsItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        main_grad(ctx.weight).add_(grad * x)
        ctx.weight.grad_added_to_main = True
        return None, torch.full_like(x, torch.nan)


def test_a_layer_may_add_to_the_main_gradient_itself():
    weight = nn.Parameter(torch.ones(3))
    specs = {"w": ParamSpec(layout=TensorLayout.whole("w", (3,)), init=ZEROS)}
    buckets = GradientBuckets({"w": weight}, specs, ParallelMesh.single())
    x = torch.tensor([1.0, 2.0, 3.0])
    with buckets.no_sync():
        AddsItself.apply(x, weight).sum().backward()
        (x * weight).sum().backward()
    AddsItself.apply(x, weight).sum().backward()
    buckets.finish()
    assert buckets.gradients()["grad/w"].tensor.tolist() == [3.0, 6.0, 9.0]


# --- partial sums -----------------------------------------------------------------------


def sum_partial():
    """On tp 2 × dp 2: a sharded weight, a norm that saw half the tokens, and two shared kv rows."""
    mesh = make_mesh(tp=2, sequence_parallel=True)
    tp, rank = mesh.tp, mesh.world.rank
    box = Box((2 * tp.rank,), (2,))
    q = TensorLayout.box("q", (4,), box)
    kv = TensorLayout.whole("kv", (2,)).replicated(tp.rank, tp.size)
    specs = {
        "sharded": ParamSpec(layout=TensorLayout.box("w", (4,), box), init=ZEROS),
        "norm": ParamSpec(
            layout=TensorLayout.whole("norm", (3,)).replicated(tp.rank, tp.size),
            init=ZEROS,
            grad_sync=(GradSync(group=tp),),
        ),
        "qkv": ParamSpec(
            layout=TensorLayout.concat([q, kv]),
            init=ZEROS,
            grad_sync=(GradSync(group=tp, start=2),),
        ),
    }
    params = {name: nn.Parameter(torch.zeros(s.layout.shape)) for name, s in specs.items()}
    buckets = GradientBuckets(params, specs, mesh)
    torch.stack([(p * 10.0**rank).sum() for p in params.values()]).sum().backward()
    buckets.finish()
    optimizer = ShardedOptimizer(buckets, SGD())
    grads = {name: x.tolist() for name, x in gather_all(buckets.gradients(), mesh.world).items()}
    norm = optimizer.grad_norm()
    optimizer.step(1.0)
    return grads, norm, {name: param.tolist() for name, param in params.items()}


def test_partial_gradients_are_summed_once_and_copies_stay_equal(ranks):
    """Gradients are 1 and 10 on tp ranks 0, 1 of replica 0, 100 and 1000 on those of replica 1."""
    results = ranks.run(sum_partial, 4)
    grads = results[0][0]
    assert grads == {
        "grad/w": [101.0, 101.0, 1010.0, 1010.0],
        "grad/norm": [1111.0] * 3,
        "grad/q": [101.0, 101.0, 1010.0, 1010.0],
        "grad/kv": [1111.0] * 2,
    }
    norm = torch.tensor([g for values in grads.values() for g in values]).norm()
    assert {found for _, found, _ in results} == {results[0][1]}
    assert results[0][1] == pytest.approx(float(norm))
    for rank, (_, _, params) in enumerate(results):
        mine = [-101.0, -1010.0][rank % 2]
        assert params == {
            "sharded": [mine] * 2,
            "norm": [-1111.0] * 3,
            "qkv": [mine] * 2 + [-1111.0] * 2,
        }


# --- misuse -----------------------------------------------------------------------------


def test_a_gradient_after_its_bucket_was_reduced_is_an_error():
    model = nn.Linear(2, 2)
    buckets = buckets_of(model, ParallelMesh.single())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of \w+ arrived after .* no_sync\(\)"):
        model(torch.ones(1, 2)).sum().backward()
    buckets.zero()
    model(torch.ones(1, 2)).sum().backward()
    buckets.finish()
    with pytest.raises(RuntimeError, match=r"call zero\(\) before a new step"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"summed already: call zero\(\)"):
        buckets.finish()


def test_unsummed_gradients_are_not_used():
    buckets = buckets_of(nn.Linear(2, 2), ParallelMesh.single())
    optimizer = ShardedOptimizer(buckets, SGD())
    for use in (
        buckets.gradients,
        optimizer.grad_norm,
        optimizer.find_nonfinite,
        lambda: optimizer.step(1.0),
    ):
        with pytest.raises(RuntimeError, match=r"needs summed gradients: call finish\(\) first"):
            use()


def test_specs_must_fit():
    params = {"w": nn.Parameter(torch.zeros(2, 3))}
    with pytest.raises(ValueError, match="parameter w has no spec"):
        GradientBuckets(params, {}, ParallelMesh.single())
    specs = {"w": ParamSpec(layout=TensorLayout.whole("w", (3, 2)), init=ZEROS)}
    with pytest.raises(ValueError, match=r"w has shape \[2, 3\], its spec \[3, 2\]"):
        GradientBuckets(params, specs, ParallelMesh.single())


def test_close_gives_the_parameters_back():
    model = nn.Linear(2, 2)
    before = [param.detach().clone() for param in model.parameters()]
    buckets = buckets_of(model, ParallelMesh.single())
    buckets.close()
    model(torch.ones(1, 2)).sum().backward()
    assert all(a.equal(b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(param.grad is not None for param in model.parameters())
    assert not hasattr(model.weight, "main_grad")

"""Weight gradients in an action of their own: the same numbers, later, and hooks that know."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mcore_parallel import GradientBuckets, ParallelMesh, RngKey, initialise, param_specs
from mcore_parallel.group import Group
from mcore_parallel.pipeline import DeferredGradients, run_schedule, zero_bubble
from mcore_parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

H = 8


class Model(nn.Module):
    """Token embedding, norm and two linears: operators that defer and operators that do not."""

    def __init__(self, group=None, sequence_parallel=False):
        super().__init__()
        cut = {"group": group or Group.single(), "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(16, H, **cut)
        self.norm = nn.LayerNorm(H)
        self.up = ColumnParallelLinear(H, 2 * H, bias=True, **cut)
        self.down = RowParallelLinear(2 * H, H, **cut)
        specs = param_specs(self, tp=cut["group"], sequence_parallel=sequence_parallel)
        initialise(dict(self.named_parameters()), specs, RngKey(4))
        self.specs = specs

    def forward(self, tokens, hidden=None):
        x = self.embedding(tokens)
        return (self.down(torch.tanh(self.up(self.norm(x)))) * x).sum()


def tokens(m=4):
    return [torch.arange(i, i + 2 * (i + 1)) % 16 for i in range(1, m + 1)]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model, batches):
    for batch in batches:
        model(batch).backward()
    return gradients(model)


def test_gradients_come_in_their_own_action_and_are_the_same():
    expected = plain(Model(), tokens())
    model, log = Model(), []

    @contextmanager
    def around(action, last):
        yield
        if action.micro_batch == 0 and action.kind != "F":
            log.append((action.kind, last, sorted(gradients(model))))

    run_schedule(
        zero_bubble(1, 4)[0],
        model,
        tokens(),
        Group.single(),
        around=around,
        weight_gradients=DeferredGradients(model.parameters()),
    )
    others = ["embedding.weight", "norm.bias", "norm.weight", "up.bias"]
    assert log == [
        ("B", False, others),
        ("W", False, ["down.weight", *others, "up.weight"]),
    ]
    torch.testing.assert_close(gradients(model), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["up.weight", "norm.weight"])
def test_frozen_weights_have_no_gradient(frozen):
    models = Model(), Model()
    for model in models:
        model.get_parameter(frozen).requires_grad_(False)
    expected = plain(models[0], tokens())
    later = DeferredGradients(models[1].parameters())
    run_schedule(zero_bubble(1, 4)[0], models[1], tokens(), Group.single(), weight_gradients=later)
    torch.testing.assert_close(gradients(models[1]), expected, rtol=1e-6, atol=1e-6)
    assert frozen not in expected


def test_a_weight_used_twice_and_recomputed_activations():
    """Both uses count, once; a recomputed forward does not defer anything by itself."""

    def loss(model, x):
        y = checkpoint(lambda z: torch.tanh(model(z)), x, use_reentrant=False)
        return model(y).square().sum()

    x = torch.randn(5, H)
    models = [ColumnParallelLinear(H, H) for _ in range(2)]
    for model in models:
        nn.init.eye_(model.weight)
    loss(models[0], x).backward()
    hooks = []
    models[1].weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad is None))
    later = DeferredGradients(models[1].parameters())
    with later.collect() as pending:
        loss(models[1], x).backward()
    assert models[1].weight.grad is None
    assert [len(computes) for computes in pending.values()] == [2]
    later.compute(pending)
    assert hooks == [True, False]  # torch calls them without a gradient, too
    assert not pending
    torch.testing.assert_close(models[1].weight.grad, models[0].weight.grad)
    loss(models[1], x).backward()  # outside of `collect` everything is as ever
    torch.testing.assert_close(models[1].weight.grad, 2 * models[0].weight.grad)
    later.close()
    assert not hasattr(models[1].weight, "deferred")


def test_buckets_get_the_same_gradients_and_know_the_last():
    """With `main_grad` buffers; the reduction starts when the last W of the chunk is done."""
    mesh = ParallelMesh.single()
    found = []
    for split in (False, True):
        model = Model()
        buckets = GradientBuckets(dict(model.named_parameters()), model.specs, mesh)
        started = []
        start = buckets._start_up_to
        buckets._start_up_to = lambda stop, s=started, f=start: (s.append(stop), f(stop))
        if split:
            later = DeferredGradients(model.parameters())
            run_schedule(
                zero_bubble(1, 4)[0],
                model,
                tokens(),
                Group.single(),
                around=buckets.around,
                weight_gradients=later,
            )
        else:
            with buckets.no_sync():
                for batch in tokens()[:-1]:
                    model(batch).backward()
            model(tokens()[-1]).backward()
        assert started[-1] == len(buckets.buckets)  # before finish()
        buckets.finish()
        found.append({k: v.tensor.clone() for k, v in buckets.gradients().items()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def split_over_ranks(sequence_parallel):
    group = Group.world()
    results = []
    for split in (False, True):
        model = Model(group, sequence_parallel)
        if split:
            later = DeferredGradients(model.parameters())
            with later.collect() as pending:
                model(tokens()[1]).backward()
            assert model.up.weight.grad is None
            assert model.down.weight.grad is None
            later.compute(pending)
        else:
            model(tokens()[1]).backward()
        results.append(gradients(model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_layers_gather_again_when_it_is_time(ranks, sequence_parallel):
    ranks.run(split_over_ranks, 2, sequence_parallel)

"""Communication runs inside computation: seen in what both did when, on one clock."""

import contextlib
import time
from unittest import mock

import pytest
import torch
from torch import nn

from mcore_parallel import SGD, ParallelConfig, ParallelMesh, ShardedOptimizer, param_specs
from mcore_parallel.data import GradientBuckets, buckets, reduction

LAYERS = 4
WIDTH = 32
SLOW = 0.03  # seconds by which a slow peer, and so the network, is late with every message


class Timeline:
    """When computations and communications began, on the clock that all processes share.

    A communication ends at the earliest when the last rank begins it. One that rank 0 began before,
    and within which it computed, was hidden.
    """

    def __init__(self, late, slow):
        self.computations, self.communications = [], []
        self.late = late  # the fault that must be found: to wait where one should only start
        self.slow = slow

    def clear(self):
        self.computations.clear()
        self.communications.clear()

    def computes(self):
        self.computations.append(time.monotonic())

    def watched(self, communicate):
        def start(*args):
            if args[-1].size == 1:
                return communicate(*args)
            time.sleep(self.slow)
            self.communications.append(time.monotonic())
            work = communicate(*args)
            if self.late:
                work.wait()
            return work

        return start


class Product(torch.autograd.Function):
    """x wᵀ whose forward and backward are on the timeline."""

    @staticmethod
    def forward(ctx, x, weight, timeline):
        ctx.save_for_backward(x, weight)
        ctx.timeline = timeline
        timeline.computes()
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.timeline.computes()
        return dy @ weight, dy.t() @ x, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 1e-3))

    def forward(self, x, timeline):
        return Product.apply(x, self.weight, timeline)


def watch(what, sharding, overlap, late):
    """The timeline of a backward pass, or of an update and the next forward pass."""
    config = ParallelConfig(sharding=sharding, overlap=overlap, bucket_size=1)
    mesh = ParallelMesh.create(config)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    specs = param_specs(layers, tp=mesh.tp, sequence_parallel=False)
    grads = GradientBuckets(dict(layers.named_parameters()), specs, mesh)
    optimizer = ShardedOptimizer(grads, SGD())
    optimizer.gather_on_use(layers)
    timeline = Timeline(late, SLOW * mesh.dp.rank)
    module, names = {
        "gradients": (reduction, ["reduce_scatter_into", "all_reduce_"]),
        "parameters": (buckets, ["all_gather_into"]),
    }[what]

    def forward():
        hidden = torch.ones(4, WIDTH, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden, timeline)
        return hidden.sum()

    with contextlib.ExitStack() as patches:
        for name in names:
            patch = mock.patch.object(module, name, timeline.watched(getattr(module, name)))
            patches.enter_context(patch)
        grads.zero()
        loss = forward()
        if what == "gradients":
            timeline.clear()
        loss.backward()
        grads.finish()
        if what == "parameters":
            timeline.clear()
            optimizer.step(1e-6)
            forward()
    optimizer.wait()
    mesh.close()
    return timeline.communications, timeline.computations


def hidden(results):
    """How many communications rank 0 computed in, of how many."""
    (starts, computations), (ends, _) = results
    spans = list(zip(starts, ends, strict=True))
    inside = [any(start < at < end for at in computations) for start, end in spans]
    return sum(inside), len(spans)


@pytest.mark.parametrize(
    ("what", "sharding"),
    [
        ("gradients", "none"),
        ("gradients", "optimizer"),
        ("gradients", "gradients"),
        ("parameters", "optimizer"),
    ],
)
def test_communication_runs_inside_computation(ranks, what, sharding):
    """All but one: there is nothing left to compute after the first layer's gradient, and nothing
    to compute before its parameters are there. An overlap that waits hides nothing."""
    assert hidden(ranks.run(watch, 2, what, sharding, True, False)) == (LAYERS - 1, LAYERS)
    assert hidden(ranks.run(watch, 2, what, sharding, True, True)) == (0, LAYERS)
    assert hidden(ranks.run(watch, 2, what, sharding, False, False)) == (0, LAYERS)

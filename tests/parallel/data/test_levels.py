"""Which parameters full sharding cuts, which it leaves whole, and what it refuses."""

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mcore_parallel import SGD, ParallelConfig, ParallelMesh, ShardedOptimizer, param_specs
from mcore_parallel.cli import main
from mcore_parallel.data import GradientBuckets, data_parallel, whole
from mcore_parallel.layout import check_tiling, gather_all, gather_layouts
from mcore_parallel.spec import Init, ParamSpec


class Expert(nn.Linear):
    """Counts as an expert's: its gradient is summed over edp."""

    def param_specs(self, prefix):
        plain = param_specs(nn.Linear(5, 5), tp=ParallelMesh.single().tp, sequence_parallel=False)
        return {
            name: ParamSpec(
                layout=spec.layout.renamed(lambda n: f"{prefix}.{n}"),
                init=Init(kind="zeros"),
                expert=True,
            )
            for name, spec in plain.items()
        }


class Mixed(nn.Module):
    """Parts of many kinds; `scale` has no dimension, `norm` is fp32 in a bf16 model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.expert = Expert(5, 5)
        self.last = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(torch.bfloat16)
        self.norm = nn.LayerNorm(5)
        self.first[0].requires_grad_(False)
        self.last.weight.data = self.last.weight.data.t().contiguous().t()

    def forward(self, x):
        x = self.expert(self.first(x.bfloat16()))
        x = self.norm(x.float()).bfloat16()
        return (self.last(x) * self.scale).float().square().sum()


def train_mixed(sharding, replicas):
    config = ParallelConfig(sharding=sharding, replicas=replicas, tp=2, etp=1)
    mesh = ParallelMesh.create(config)
    model = Mixed()
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    # edp reaches over tp here, and so the shares of the expert over all ranks.
    buckets = data_parallel(model, specs, mesh, units=[model.first])
    optimizer = ShardedOptimizer(buckets, SGD())
    for step in range(2):
        buckets.zero()
        torch.manual_seed(step)
        first, last = torch.randn(2, 2, 4, 5)
        with buckets.no_sync():
            model(first[mesh.dp.rank]).backward()
        model(last[mesh.dp.rank]).backward()
        buckets.finish()
        optimizer.step(0.05)
    optimizer.wait()
    tensors = optimizer.state_tensors()
    layouts = gather_layouts({key: x.layout for key, x in tensors.items()}, mesh.world)
    check_tiling(layout for by_key in layouts.values() for layout in by_key.values())
    held = buckets.parameters()
    cut = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}
    rows = {name: tuple(held[name].tensor.shape) for name in cut}
    with torch.no_grad():
        loss = float(model(torch.ones(4, 5)))
    return gather_all(tensors, mesh.world), rows, loss


def test_what_is_cut_and_what_stays_whole(ranks):
    """Frozen matrices are cut too; frozen vectors, scalars and the few of another dtype are not."""
    plain = ranks.run(train_mixed, 4, "none", 1)
    cut = ranks.run(train_mixed, 4, "parameters", 1)
    torch.testing.assert_close(cut[0][0], plain[0][0], rtol=1e-2, atol=1e-3)
    assert [loss for *_, loss in cut] == pytest.approx([plain[0][2]] * 4, rel=1e-2)
    rows = [shapes for _, shapes, _ in cut]
    names = {"first.0.weight", "first.2.weight", "first.2.bias", "last.weight"}
    assert set(rows[0]) == names | {"expert.weight", "expert.bias"}
    # Ranks 0 and 2 share what is dense; an uneven first dimension, or an even second one.
    assert [shapes["first.0.weight"] for shapes in rows] == [(4, 5), (4, 5), (3, 5), (3, 5)]
    assert plain[0][1] == {}


def rebuilt(times):
    """Threads and open files of this process after each of so many meshes."""
    found = []
    for _ in range(times):
        mesh = ParallelMesh.create(ParallelConfig(sharding="parameters", replicas=2))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
        buckets = data_parallel(model, specs, mesh, units=model)
        optimizer = ShardedOptimizer(buckets, SGD(momentum=0.9))
        buckets.zero()
        model(torch.ones(2, 5)).sum().backward()
        buckets.finish()
        optimizer.step(0.1)
        mesh.close()
        del mesh, model, buckets, optimizer
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    return found


class Flat(nn.Linear):
    """Its output is a view."""

    def forward(self, x):
        return super().forward(x).view(-1)


def changed_in_place(sharding):
    mesh = ParallelMesh.create(ParallelConfig(sharding=sharding))
    torch.manual_seed(1)
    model = nn.Sequential(Flat(4, 4), nn.Unflatten(0, (2, 4)), Flat(4, 4))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    buckets = data_parallel(model, specs, mesh, units=[model[0], model[2]])
    buckets.zero()
    model(torch.ones(2, 4)).add_(1.0).square().sum().backward()
    buckets.finish()
    return gather_all(buckets.gradients(), mesh.world)


def test_outputs_may_be_views_and_changed_in_place(ranks):
    """Else parameters would not be gathered for the backward pass; torch warns of it."""
    plain, cut = (ranks.run(changed_in_place, 2, level)[0] for level in ("none", "parameters"))
    torch.testing.assert_close(cut, plain)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="only Linux counts threads")
def test_nothing_is_left_of_a_mesh_that_was_closed(ranks):
    """What torch remembers of cut parameters must not hold their groups: threads and sockets."""
    for found in ranks.run(rebuilt, 4, 50 if os.environ.get("NIGHTLY") else 5):
        assert found[1:] == [found[1]] * (len(found) - 1)


def mistakes():
    mesh = ParallelMesh.create(ParallelConfig(sharding="parameters"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    specs = param_specs(model, tp=mesh.tp, sequence_parallel=False)
    model[1].weight = model[0].weight
    return [
        message_of(lambda: data_parallel(model, specs, mesh, units=model)),
        message_of(lambda: data_parallel(model, specs, mesh, partition=whole)),
        message_of(lambda: GradientBuckets(dict(model.named_parameters()), specs, mesh)),
        message_of(lambda: data_parallel(model, {}, mesh)),
    ]


def message_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def test_mistakes_are_named(ranks):
    shared, partition, buckets, spec = ranks.run(mistakes, 2)[0]
    assert shared.startswith("0.weight and 1.weight are one parameter, and not of one unit")
    assert "needs whole ones: use sharding gradients" in partition
    assert "call data_parallel(model, …)" in buckets
    assert spec == "parameter 0.weight has no spec"


FLAGS = re.MULTILINE | re.DOTALL
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data-parallel.md").read_text()


def test_the_page_tells_the_truth(capsys):
    ((command, printed),) = re.findall(
        r"^```text\n\$ mcore-parallel (.*?)\n(.*?)^```$", PAGE, FLAGS
    )
    assert main(command.split()) == 0
    assert capsys.readouterr().out == printed
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, FLAGS)
    found = {}
    exec(code, found)
    assert found["optimizer"].step_count == 5

"""How long saves and plans take, in seconds of CPU: what a busy machine changes least.

Seconds of the program's own: the system's for creating a file are several times as many while
others write to the same disk.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.alike import alike, digest_of, grouped, split
from mcore_ckpt.planning import describe, plan_save
from mcore_parallel.layout import LayoutTensor, TensorLayout, plan

pytestmark = pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="a minute (NIGHTLY)")


def cpu_seconds(job: Callable[[], Any]) -> float:
    start = os.times().user
    job()
    return os.times().user - start


def test_five_thousand_small_tensors(tmp_path: Path) -> None:
    names = [f"model/layers.{i}.norm.weight" for i in range(5000)]
    tensors = {
        name: LayoutTensor(torch.randn(64, 16), TensorLayout.whole(name, (64, 16)))
        for name in names
    }
    mcore_ckpt.save(tmp_path / "first", step=1, tensors=dict(list(tensors.items())[:10]))
    assert cpu_seconds(lambda: mcore_ckpt.save(tmp_path, step=1, tensors=tensors)) < 2
    assert cpu_seconds(lambda: mcore_ckpt.load(tmp_path, tensors)) < 2


def flat_shard(num_tensors: int, rank: int, num_ranks: int) -> dict[str, Any]:
    """What a rank describes that holds its share of all tensors, one after the other."""
    shape = (1024, 256)
    numel = shape[0] * shape[1]
    total = num_tensors * numel
    step = -(-total // num_ranks)
    low, high = rank * step, min((rank + 1) * step, total)
    first, last = low // numel, -(-high // numel)
    wholes = [
        TensorLayout.whole(f"model/layers.{i}.w", shape).reshaped((numel,))
        for i in range(first, last)
    ]
    layout = TensorLayout.concat(wholes).flat_range(low - first * numel, high - first * numel)
    return describe({"shard": LayoutTensor(torch.empty(1).expand(layout.shape), layout)})


def test_planning_for_thousands_of_ranks() -> None:
    """100,000 tensors over 4,096 ranks."""
    described = [flat_shard(100_000, rank, 4096) for rank in range(4096)]
    bounds = {"chunk_bytes": 8 << 20, "exchange_bytes": 256 << 20}
    assert cpu_seconds(lambda: plan_save(alike(described), range(4096), **bounds)) < 10


def ordinary_shard(names: range, rank: int) -> dict[str, Any]:
    """What a rank describes of some tensors: matrices cut in eight, rows or columns, and vectors.

    Tensor-parallel 8, 8 stages, 64 replicas of each; of the vectors, which all eight hold, 512.
    """
    shard, replica = rank % 8, rank // 64
    cuts = []
    for dim in (0, 1):
        whole = TensorLayout.whole("w", (1024, 256))
        size = whole.shape[dim] // 8
        cuts.append(whole.slice(dim, size * shard, size * shard + size).replicated(replica, 64))
    vector = TensorLayout.whole("w", (1024,))
    cuts.append(vector.replicated(replica * 8 + shard, 512))
    described = [
        describe({"w": LayoutTensor(torch.empty(layout.shape), layout)})["w"] for layout in cuts
    ]
    return {
        f"{i}": {
            **described[i % 3],
            "fragments": [
                [f"model/layers.{i}.w", *row[1:]] for row in described[i % 3]["fragments"]
            ],
        }
        for i in names
    }


def test_planning_for_thousands_of_ranks_in_an_ordinary_layout() -> None:
    """100,000 tensors over 4,096 ranks."""
    stages = [range(stage * 12_500, (stage + 1) * 12_500) for stage in range(8)]
    shared = [split(ordinary_shard(stages[rank // 8], rank))[0] for rank in range(64)]
    digests = [digest_of(description) for description in shared]
    kinds = grouped(
        [shared[rank % 64] for rank in range(4096)],
        [digests[rank % 64] for rank in range(4096)],
        [split(ordinary_shard(stages[rank % 64 // 8][:3], rank))[1] for rank in range(4096)],
    )
    bounds = {"chunk_bytes": 8 << 20, "exchange_bytes": 256 << 20}
    plans = []
    assert cpu_seconds(lambda: plans.append(plan_save(kinds, range(4096), **bounds))) < 10
    assert len(plans[0].tensors) == 100_000


def test_planning_from_one_cut_to_another() -> None:
    """20,000 tensors on 8 ranks, rows and columns, into columns: 720,000 copies."""
    shape = (1024, 512)
    sources: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in range(8)}
    targets: dict[int, dict[str, TensorLayout]] = {rank: {} for rank in range(8)}
    for i in range(20_000):
        whole = TensorLayout.whole(f"model/layers.{i}.w", shape)
        for held, dim in ((sources, i % 2), (targets, 1)):
            size = shape[dim] // 8
            for rank in range(8):
                held[rank][f"{i}"] = whole.slice(dim, rank * size, rank * size + size)
    assert cpu_seconds(lambda: plan(sources, targets)) < 10

"""Batches that grow, and what becomes of the end of an epoch."""

import dataclasses
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import mcore_ckpt
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.layout import gather_all
from mcore_parallel.testing import RankPool
from mcore_train.bench import bench
from mcore_train.callbacks import read_metrics
from mcore_train.config import TrainConfig
from mcore_train.data import ReplicaData
from mcore_train.load import config_to_tree
from mcore_train.pretrain import pretrain, run_rank
from mcore_train.session import build_session
from mcore_train.step import Step

sys.path.append(str(Path(__file__).parent))
from toy import toy, write_tokens

SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_size": 16, "dropout": 0.1}
RAMP = {"ramp": {"start": 2, "increment": 2, "samples": 12}}
SIZES = {"sizes": {"starts": [0, 4, 10], "batches": [4, 2, 8]}}
MOE = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 8, "aux_loss_coefficient": 0.05}


def growing(folder: Path, growth: dict[str, Any], steps: int, layout: str) -> TrainConfig:
    config = toy(
        model=SMALL,
        steps=steps,
        batch={"global_size": 8, "micro_size": 1, **growth},
        schedule={"decay_steps": 4},
        checkpoint={"directory": str(folder)},
        log={"directory": str(folder)},
        evaluate={"windows": 1},
    )
    return dataclasses.replace(config, parallel=ParallelConfig.parse(layout))


def rows_of(folder: Path, name: str) -> list[Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [row[name] for row in rows if "loss" in row]


@pytest.mark.parametrize(
    ("growth", "sizes"), [(RAMP, [2, 2, 4, 6, 8, 8]), (SIZES, [4, 2, 2, 2, 8, 8])]
)
def test_a_run_goes_on_within_a_ramp(
    ranks: RankPool, tmp_path: Path, growth: dict[str, Any], sizes: list[int]
) -> None:
    """In one process bit for bit, and under layouts whose micro-batches are others."""
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    pretrain(growing(whole, growth, 6, "tp=1"), nproc=1)
    for steps in (3, 6):
        pretrain(growing(parts, growth, steps, "tp=1"), nproc=1)
    for steps, layout in ((3, "pp=2,schedule=zb-h1"), (6, "dp=2")):
        tree = config_to_tree(growing(other, growth, steps, layout))
        ranks.run(run_rank, 2, tree, timeout=60)
    assert [tokens // 8 for tokens in rows_of(whole, "tokens")] == sizes
    for folder in (parts, other):
        assert rows_of(folder, "tokens") == rows_of(whole, "tokens")
        assert mcore_ckpt.read_state(folder)["data"] == mcore_ckpt.read_state(whole)["data"]
    assert rows_of(parts, "loss") == rows_of(whole, "loss")
    assert rows_of(other, "loss") == pytest.approx(rows_of(whole, "loss"), rel=1e-5)
    assert mcore_ckpt.read_state(whole)["data"]["consumed_samples"] == sum(sizes)


def test_files_of_a_blend_grow_too(tmp_path: Path) -> None:
    names = [str(write_tokens(tmp_path / name, seed=len(name))) for name in ("a", "bb")]
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps({"train": {"files": names, "counts": [12, 10]}}))
    batch = {"global_size": 8, "micro_size": 1, **RAMP}
    config = toy(data={"mock": False, "parts": str(parts)}, batch=batch, steps=5)
    data = ReplicaData(config, ParallelMesh.single())
    batches, consumed, sizes = data.batches(), 0, []
    for _ in range(5):
        sizes.append(len(next(batches)))
        consumed = data.after(consumed)
    data.close()
    assert sizes == [2, 2, 4, 6, 8]
    assert sum(data.counters(consumed).values()) == consumed == sum(sizes)
    with pytest.raises(ValueError, match=r"sum to 22 samples, .*=8 take 30: use steps 5 or less"):
        ReplicaData(dataclasses.replace(config, steps=6), ParallelMesh.single())


def epochs(config: TrainConfig, steps: int) -> list[list[int]]:
    """The samples of every step, below 0 for rows that stand for none."""
    data = ReplicaData(config, ParallelMesh.single())
    batches, length = data.batches(), config.data.seq_length
    found = []
    for _ in range(steps):
        ids = [int(row) // length for batch in next(batches) for row in batch.rows[::length]]
        found.append(ids)
    data.close()
    return found


@pytest.mark.parametrize("last", ["join", "drop", "pad"])
def test_the_end_of_an_epoch(tmp_path: Path, last: str) -> None:
    data = {"mock": False, "train": str(write_tokens(tmp_path / "tokens")), "split": "8,2"}
    config = toy(data=data, batch={"global_size": 8, "micro_size": 2, "last": last})
    count = len(ReplicaData(config, ParallelMesh.single()).datasets.train)
    whole, rest = divmod(count, 8)
    assert rest
    steps = whole + (last != "drop")
    found = epochs(config, 2 * steps)
    first, second = ([*chain(*part)] for part in (found[:steps], found[steps:]))
    if last == "join":
        assert sorted((first + second)[:count]) == list(range(count))
        assert min(first + second) >= 0
        return
    for part in (first, second):
        there = [sample for sample in part if sample >= 0]
        assert len(set(there)) == len(there) == (count if last == "pad" else 8 * whole)
        assert len(part) - len(there) == (8 - rest if last == "pad" else 0)


def accumulated(config: TrainConfig, skip: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, tokens and gradients of the step after `skip` samples."""
    session = build_session(config, ParallelMesh.single())
    session.data.load_state_dict(session.data.state_dict(skip))
    shares = Step(session).accumulate(next(session.data.batches()), RngKey(4))
    gathered = gather_all(session.buckets.gradients(), session.mesh.world)
    gradients = {name: value.clone() for name, value in gathered.items()}
    session.close()
    return float(shares.loss), shares.tokens, gradients


def test_rows_without_a_sample_change_nothing(tmp_path: Path) -> None:
    """Neither loss nor gradient, nor the balance of experts: as if the batch were smaller."""
    prefix = write_tokens(tmp_path / "tokens", documents=23)
    data = {"mock": False, "train": str(prefix), "split": "1,0"}
    fields = {"model": {**SMALL, "pattern": ["*E", "*-"], "moe": MOE}, "data": data}
    padded = toy(**fields, batch={"global_size": 4, "micro_size": 4, "last": "pad"})
    count = len(ReplicaData(padded, ParallelMesh.single()).datasets.train)
    rest = count % 4
    assert rest
    few = toy(**fields, batch={"global_size": rest, "micro_size": rest})
    (loss, tokens, gradients), (small_loss, small_tokens, small) = (
        accumulated(config, count - rest) for config in (padded, few)
    )
    assert tokens == small_tokens == 8 * rest
    assert loss == pytest.approx(small_loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, small[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({**RAMP, **SIZES}, "batch.ramp and batch.sizes: each says how the batch grows, give one"),
        ({"ramp": {"start": 3, "increment": 2, "samples": 9}}, "not reached from 3 .*nearest: 7"),
        ({"sizes": {"starts": [0, 4], "batches": [4, 6]}}, "ends with 6 samples"),
        (
            {"ramp": {"start": 8, "by": 2}},
            "unknown key batch.ramp.by: known in batch.ramp are start, increment, samples",
        ),
        ({"last": "keep"}, "batch.last: input should be 'join', 'drop' or 'pad'"),
    ],
)
def test_growth_that_does_not_fit(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        toy(batch={"global_size": 8, "micro_size": 2, **batch})


def test_every_size_fits_the_replicas() -> None:
    """U03: not the final batch alone."""
    batch = {"global_size": 8, "micro_size": 2, "sizes": {"starts": [0, 9], "batches": [6, 8]}}
    with pytest.raises(ValueError, match=r"the size 6 on the way to .*=8 .* dp=2 = 4: use 4 or 8$"):
        toy(batch=batch).check_world(2)
    assert toy(batch=batch).check_world(1).micro_batches == 4


def test_what_a_blend_and_a_benchmark_cannot_take(tmp_path: Path) -> None:
    names = [str(write_tokens(tmp_path / name)) for name in ("a", "b")]
    config = toy(data={"mock": False, "blend": names}, batch={"last": "drop"})
    with pytest.raises(ValueError, match=r"batch.last=drop is for one file"):
        ReplicaData(config, ParallelMesh.single())
    with pytest.raises(ValueError, match="a benchmark are of one size"):
        bench(toy(batch={"global_size": 8, "micro_size": 2, **RAMP}))

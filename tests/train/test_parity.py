"""Training under every layout equals training in one process, by the metric of `parity`."""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity import (
    Difference,
    Record,
    Report,
    comparable,
    compare,
    record,
    record_rank,
    world_size,
)

sys.path.append(str(Path(__file__).parent))
from toy import GPT2_DRESS, toy, toy_tree

STEPS = 3
DRESSES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2_DRESS}


def layouts() -> list[str]:
    """tp {1,2,4} x pp {1,2} x dp {1,2} x sequence parallel on/off, without the single process."""
    found = []
    for tp, pp, dp, sp in itertools.product((1, 2, 4), (1, 2), (1, 2), (False, True)):
        if tp * pp * dp > 1 and not (sp and tp == 1):
            found.append(f"tp={tp},pp={pp},dp={dp}" + (",sp" if sp else ""))
    return found


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[TrainConfig, Record]]:
    found = {}
    for dress, fields in DRESSES.items():
        config = comparable(toy(model={**fields, "dropout": 0.1}, steps=STEPS))
        reference = record(config, ParallelMesh.single(), STEPS)
        assert reference is not None
        found[dress] = config, reference
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("dress", DRESSES)
def test_layouts_equal_one_process(
    ranks: RankPool, references: dict[str, tuple[TrainConfig, Record]], dress: str, layout: str
) -> None:
    """U26, U28 kind: loss, every gradient and the parameters after three steps, with dropout."""
    config, reference = references[dress]
    parallel = ParallelConfig.parse(layout)
    size = world_size(parallel)
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(record_rank, size, tree, STEPS, timeout=200)[0]
    report = compare(reference, found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    names = {d.name for d in report.differences if d.kind == "gradient"}
    assert names == set(reference.gradients)
    assert len(names) > 20


@pytest.mark.parametrize("options", ["zero=0", "bucket_size"])
def test_other_ways_of_data_parallelism(
    ranks: RankPool, references: dict[str, tuple[TrainConfig, Record]], options: str
) -> None:
    config, reference = references["gpt2"]
    if options == "bucket_size":  # many small buckets, uneven shards, no overlap
        parallel = ParallelConfig(dp=3, bucket_size=700, overlap=False)
        config = dataclasses.replace(
            config, batch=dataclasses.replace(config.batch, global_size=6, micro_size=1)
        )
        single = record(config, ParallelMesh.single(), STEPS)
        assert single is not None
        reference = single
    else:
        parallel = ParallelConfig.parse("dp=2,tp=2,zero=0")
    size = world_size(parallel)
    tree = config_to_tree(dataclasses.replace(config, parallel=parallel))
    found = ranks.run(record_rank, size, tree, STEPS, timeout=120)[0]
    report = compare(reference, found, layout=options, world_size=size)
    assert report.holds, report.first_failure()


def test_the_metric_finds_a_small_error(
    references: dict[str, tuple[TrainConfig, Record]],
) -> None:
    _, reference = references["llama"]
    name = "layers.2.mlp.up.weight"
    off = reference.gradients[name].clone()
    off[3, 5] += 3e-5 * torch.linalg.vector_norm(off)
    wrong = dataclasses.replace(reference, gradients={**reference.gradients, name: off})
    report = compare(reference, wrong, layout="x", world_size=1)
    assert not report.holds
    failure = report.first_failure()
    assert failure is not None
    assert (failure.kind, failure.name) == ("gradient", name)
    assert failure.ratio == pytest.approx(3e-5, rel=1e-2)


def test_nan_and_missing_names_are_differences() -> None:
    one = Record(losses=(1.0,), gradients={"a": torch.ones(2)}, parameters={"a": torch.ones(2)})
    nan = dataclasses.replace(one, parameters={"a": torch.tensor([1.0, float("nan")])})
    assert not compare(one, nan, layout="x", world_size=1).holds
    with pytest.raises(ValueError, match="different names"):
        compare(
            one, dataclasses.replace(one, gradients={"b": torch.ones(2)}), layout="x", world_size=1
        )
    assert Report(
        layout="x", world_size=1, differences=(Difference(kind="loss", name="0", ratio=0.0),)
    ).holds


def test_seeds_matter(references: dict[str, tuple[TrainConfig, Record]]) -> None:
    """The comparison would see another initialisation."""
    _, reference = references["llama"]
    other = comparable(config_from_tree(toy_tree(seed=5, steps=STEPS, model={"dropout": 0.1})))
    found = record(other, ParallelMesh.single(), STEPS)
    assert found is not None
    assert not compare(reference, found, layout="x", world_size=1).holds

"""Kinds of experts that the matrix's families lack train over layouts as in one process."""

import os

import pytest

from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.testing import RankPool
from mcore_train.load import config_to_tree
from mcore_train.parity import LEAST_MARGIN, Record, comparable, compare, record, record_rank
from mcore_train.parity.families import STEPS, family_config
from mcore_train.parity.parts import AXES, part_config, parts
from mcore_train.parity.run import world_size

KINDS = [name for name in parts() if name.startswith("experts") and "softmax" not in name]
LAYOUTS = ["tp=2,sp,cp=2,cp-kind=ring,ep=2,etp=1"]
if os.environ.get("NIGHTLY"):
    LAYOUTS += [
        "tp=2,pp=2",
        "cp=2,cp-kind=all-gather,ep=2",
        "cp=2,cp-kind=all-to-all,tp=2,ep=2,etp=1",
        "cp=4,cp-kind=two-level:2",
    ]
_SINGLE: dict[str, Record] = {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_experts_equals_one_process(ranks: RankPool, name: str, layout: str) -> None:
    """U36: sigmoid scores in groups with a correction, a capacity, shared and latent experts."""
    config = part_config(name, layout)
    if name not in _SINGLE:
        single = record(comparable(config), ParallelMesh.single(), STEPS)
        assert single is not None
        assert single.margin > LEAST_MARGIN
        _SINGLE[name] = single
    size = world_size(config.parallel)
    found = ranks.run(record_rank, size, config_to_tree(config), STEPS, timeout=200)[0]
    report = compare(_SINGLE[name], found, layout=layout, world_size=size)
    assert report.holds, report.first_failure()
    assert {d.name for d in report.differences if d.kind == "gradient"} == set(
        _SINGLE[name].gradients
    )


def test_every_part_has_a_model_that_is_compared() -> None:
    """Those of the families are in the matrix, where each family meets each value of an axis."""
    letters = {
        letter
        for family in ("gpt", "moe", "hybrid")
        for letter in "".join(family_config(family).model.layer_pattern)
    }
    for name, model in parts().items():
        own = set("".join(model.layer_pattern))
        assert own <= letters, name
        assert model.family in ("gpt", "bert", "t5")


@pytest.mark.parametrize("axis", AXES)
def test_what_the_table_says_is_what_a_run_is_told(axis: str) -> None:
    assert part_config("experts by softmax", axis).parallel == ParallelConfig.parse(axis)
    if "ep=" in axis:
        with pytest.raises(ValueError, match="ep=2 divides experts, and there are none here"):
            part_config("attention", axis)
    else:
        part_config("attention", axis)

"""The small matrix: every two values that go together are in one of few combinations."""

from itertools import combinations

import pytest

from mcore_train.parity.cells import AXES, Cell
from mcore_train.parity.covering import pairs_of, small_matrix, spread

Value = tuple[str, str]
SPLIT = [value for value in AXES["pipeline"] if "interleaved" in value or "zb" in value]
TOGETHER = ["zero=2", "zero=3"]


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return small_matrix()


def impossible() -> set[frozenset[Value]]:
    """Pairs that are refused, or in which one value says nothing beside the other."""
    dense = ("gpt", "bert", "t5")
    pairs = [(("family", f), ("experts", value)) for f in dense for value in AXES["experts"][1:]]
    pairs += [(("pipeline", one), ("level", other)) for one in SPLIT for other in TOGETHER]
    pairs += [(("tensor", value), ("recompute", "spread")) for value in ("", "tp=2,sp")]
    pairs += [(("tensor", ""), ("experts", AXES["experts"][2]))]
    pairs += [(("level", "zero=0"), ("replica", "replicas=2"))]
    return {frozenset(pair) for pair in pairs}


def test_every_pair_that_is_possible_is_covered(cells: list[Cell]) -> None:
    covered = {frozenset(pair) for cell in cells for pair in pairs_of(cell)}
    every = {
        frozenset([(first, one), (second, other)])
        for first, second in combinations(AXES, 2)
        for one in AXES[first]
        for other in AXES[second]
    }
    assert every - covered == impossible()


def test_they_are_few_small_and_not_refused(cells: list[Cell]) -> None:
    assert len({cell.values for cell in cells}) == len(cells) <= 50
    assert max(cell.world_size for cell in cells) == 8
    assert [cell.refusal for cell in cells if cell.refusal] == []
    assert not any(cell.is_vacuous for cell in cells)
    families = [sum(cell["family"] == family for cell in cells) for family in AXES["family"]]
    assert min(families) >= len(cells) // 6


def test_an_order_in_which_values_meet_early(cells: list[Cell]) -> None:
    """The first of one rank brings all of its pairs; copies of what was there come last."""
    few = [Cell.of({"family": family}) for family in AXES["family"]]
    order = spread([*cells, *few, *few])
    assert sorted(cell.values for cell in order) == sorted(c.values for c in [*cells, *few, *few])
    assert {cell.values for cell in order[-len(few) :]} == {cell.values for cell in few}
    half = {pair for cell in order[: len(cells) // 2] for pair in pairs_of(cell)}
    other = {pair for cell in order[len(cells) // 2 :] for pair in pairs_of(cell)}
    assert len(half) > len(other - half) * 2


def test_the_same_combinations_every_time(cells: list[Cell]) -> None:
    assert [cell.values for cell in small_matrix()] == [cell.values for cell in cells]


def test_with_fewer_ranks_there_are_fewer(cells: list[Cell]) -> None:
    few = small_matrix(2)
    assert max(cell.world_size for cell in few) == 2
    assert {cell["family"] for cell in few} == set(AXES["family"])


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({}, "dp=1"),
        ({"replica": "twice"}, "dp=2"),
        ({"level": "zero=0"}, "zero=0,dp=2"),  # with one rank there would be nothing to shard
        ({"level": "zero=3", "context": "cp=2,cp-kind=ring"}, "cp=2,cp-kind=ring,zero=3,dp=1"),
        ({"experts": "ep=2"}, "ep=2,dp=2"),
        ({"experts": "ep=2", "tensor": "tp=2"}, "tp=2,ep=2,dp=2"),
        (
            {"experts": AXES["experts"][2], "tensor": "tp=2"},
            "tp=2,ep=2,etp=1,dispatch=all-gather,dp=1",
        ),
        ({"replica": "replicas=2"}, "replicas=2,dp=2"),
        ({"replica": "replicas=2", "experts": "ep=2"}, "ep=2,replicas=2,dp=4"),
    ],
)
def test_layouts_have_the_fewest_replicas_that_do_something(
    values: dict[str, str], layout: str
) -> None:
    cell = Cell.of(values)
    assert cell.layout == layout
    assert cell.refusal is None

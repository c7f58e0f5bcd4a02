"""Training under combinations of all axes equals training in one process."""

import dataclasses
import json
import math
from collections.abc import Iterator

import pytest

from mcore_parallel import ParallelConfig
from mcore_parallel.testing import RankPool
from mcore_train.parity import LEAST_MARGIN, Difference, Report
from mcore_train.parity.cells import AXES, MOST_RANKS, Cell, full_matrix
from mcore_train.parity.covering import small_matrix
from mcore_train.parity.families import FAMILIES, SAMPLES, STEPS
from mcore_train.parity.matrix import Matrix, Outcome, choose_cells

CELLS = small_matrix()


@pytest.fixture(scope="module")
def matrix(ranks: RankPool) -> Iterator[Matrix]:
    with Matrix(ranks) as matrix:
        yield matrix


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_combination_equals_one_process(matrix: Matrix, cell: Cell) -> None:
    """U05, U26, U27, U28, U29, U31, U35, U36: loss, gradients and parameters after three steps.

    With dropout, recomputed or not. The combinations are generated; every two values of different
    axes are in one of them. Auxiliary losses are compared as well, and so are copies of parameters
    on different ranks, bit by bit.
    """
    outcome = matrix.run(cell)
    assert outcome.report is not None
    assert outcome.report.margin > LEAST_MARGIN
    assert outcome.verdict == "equal", outcome.report.first_failure()
    reference = matrix.reference(cell["family"], cell.is_packed)
    compared = outcome.report.differences
    assert {d.name for d in compared if d.kind == "gradient"} == set(reference.gradients)
    assert sum(d.kind == "loss" for d in compared) == STEPS
    found = [d.name for d in compared if d.kind == "auxiliary"]
    balanced = [name for name in found if name.startswith("moe_balance_loss")]
    others = {name.partition(" of ")[0] for name in found if name not in balanced}
    assert others == {"moe": {"mtp_loss_0"}, "bert": {"pair_loss"}}.get(cell["family"], set())
    wanted = [f"step {i}" for i in range(STEPS)] if cell["family"] in ("moe", "hybrid") else []
    assert [name.partition(" of ")[2] for name in balanced] == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_what_training_might_stumble_over(matrix: Matrix, family: str) -> None:
    """A gradient that is zero, or a loss that does not move, would be equal anywhere."""
    found = matrix.reference(family, True)
    names = {
        "gpt": ["embedding.weight", "position_embedding.weight", "layers.2.mlp.up.bias"],
        "moe": [
            "layers.2.moe.router.weight",
            "layers.0.moe.experts.gate.weight",
            "layers.1.attention.k_rope.weight",
            "mtp.0.layers.0.moe.experts.up.weight",
        ],
        "hybrid": [
            "layers.0.mamba.a_log",
            "layers.2.delta_net.a_log",
            "layers.1.moe.experts.down.bias",
        ],
        "bert": ["token_type_embedding.weight", "binary_head.weight", "lm_head.dense.weight"],
        "t5": [
            "encoder.relative_bias.weight",
            "decoder.relative_bias.weight",
            "decoder.layers.0.cross_attention.k.weight",
        ],
    }
    assert len(found.gradients) > 25
    for name in names[family]:
        assert found.gradients[name].abs().max() > 1e-6, name
    zero = [name for name, gradient in found.gradients.items() if not gradient.any()]
    assert zero == []
    assert len(set(found.losses)) == STEPS
    assert found.margin > LEAST_MARGIN


def test_the_reference_is_one_process_without_recomputation(matrix: Matrix) -> None:
    """The combination that changes nothing gives the very same numbers, on a rank of the pool."""
    outcome = matrix.run(Cell.of({"family": "gpt"}))
    assert outcome.report is not None
    assert set(outcome.largest.values()) == {0.0}


# --- what is not compared -----------------------------------------------------------------------


def test_a_refused_combination_says_why_and_starts_nothing() -> None:
    class NoPool(RankPool):
        def run(self, *args: object, **kwargs: object) -> list[object]:  # type: ignore[override]
            raise AssertionError("a process was started")

    cell = Cell.of({"family": "gpt", "experts": "ep=2"})
    with Matrix(NoPool()) as matrix:
        outcome = matrix.run(cell)
    assert (outcome.verdict, outcome.is_good) == ("refused", True)
    assert str(outcome) == (
        "refused gpt ep=2,dp=2: ep=2 divides experts, and there are none here: use ep=1"
    )
    assert outcome.row()["reason"] == cell.refusal


@pytest.mark.parametrize(
    ("ratio", "margin", "verdict"),
    [(1e-6, 1.0, "equal"), (2e-5, 1.0, "differs"), (float("nan"), 1.0, "differs"),
     (2e-5, 1e-6, "unclear"), (1e-6, 1e-6, "unclear")],
)  # fmt: skip
def test_verdicts(ratio: float, margin: float, verdict: str) -> None:
    cell = Cell.of({"tensor": "tp=2"})
    difference = Difference(kind="gradient", name="final_norm.weight", ratio=ratio)
    report = Report(layout="", world_size=2, differences=(difference,), margin=margin)
    outcome = Outcome(cell=cell, report=report, seconds=1.0)
    assert (outcome.verdict, outcome.is_good) == (verdict, verdict == "equal")
    assert ("first in gradient final_norm.weight" in str(outcome)) == (not difference.holds)
    assert outcome.row()["verdict"] == verdict
    written = json.loads(json.dumps(outcome.row(), allow_nan=False))  # JSON knows no NaN
    assert written["largest"] == {"gradient": None if math.isnan(ratio) else ratio}
    fails = dataclasses.replace(outcome, report=None, error="ValueError: no")
    assert (fails.verdict, fails.is_good) == ("fails", False)
    assert str(fails) == "fails   moe tp=2,dp=1: ValueError: no"


# --- the full matrix ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full() -> list[Cell]:
    return list(full_matrix())


def test_the_full_matrix_has_every_value_of_every_axis(full: list[Cell]) -> None:
    runs = [cell for cell in full if cell.refusal is None]
    assert len(runs) > 1200
    assert max(cell.world_size for cell in runs) == MOST_RANKS
    for axis, fewest in {"recompute": 60, "documents": 400, "replica": 200, "buckets": 300}.items():
        counts = [sum(cell[axis] == value for cell in runs) for value in {c[axis] for c in runs}]
        assert min(counts) >= fewest, axis
    spread = [cell for cell in runs if cell["recompute"] == "spread"]
    assert all(cell["tensor"] == "tp=2" for cell in spread)
    assert {cell["tensor"] for cell in runs} == {"", "tp=2", "tp=2,sp"}
    assert {cell["experts"] for cell in runs} == set(AXES["experts"])


@pytest.mark.parametrize("family", ["gpt", "moe", "hybrid"])
def test_all_axes_at_once_are_not_refused(full: list[Cell], family: str) -> None:
    """tp, pp with each schedule, cp of each kind, ep of experts, and sharded optimizer state."""
    wanted = {"family": family, "level": "zero=1"}
    mine = [cell for cell in full if all(cell[axis] == value for axis, value in wanted.items())]
    every = [c for c in mine if all(c[axis] for axis in ("tensor", "pipeline", "context"))]
    every = [c for c in every if (c["experts"] == "") == (family == "gpt")]
    assert len({(cell["pipeline"], cell["context"]) for cell in every}) == 5 * 4
    assert [cell for cell in every if cell.refusal is not None] == []


def test_parts_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_train.parity.matrix.small_matrix", lambda: CELLS)
    parts = [choose_cells("small", part=f"{i}/3") for i in (1, 2, 3)]
    assert {cell.values for part in parts for cell in part} == {cell.values for cell in CELLS}
    assert sum(map(len, parts)) == len(CELLS)
    assert {cell["family"] for cell in choose_cells("small", family="hybrid")} == {"hybrid"}
    full = [*CELLS, Cell.of({"family": "gpt", "experts": "ep=2"})]
    monkeypatch.setattr("mcore_train.parity.matrix.full_matrix", lambda: full)
    nights = [choose_cells("full", part=f"{i}/3") for i in (1, 2, 3)]
    dealt = sorted(cell.values for night in nights for cell in night)
    assert dealt == sorted(cell.values for cell in full)
    ranks = [sum(c.world_size for c in night if c.refusal is None) for night in nights]
    assert max(ranks) - min(ranks) <= 2 * max(cell.world_size for cell in CELLS)
    with pytest.raises(ValueError, match="family 'gtp': known are gpt, moe, hybrid, bert, t5"):
        choose_cells("small", family="gtp")
    for part in ("0/3", "4/3", "2", "a/b"):
        with pytest.raises(ValueError, match="not of the form I/N"):
            choose_cells("small", part=part)


def test_every_replica_has_samples(full: list[Cell]) -> None:
    for cell in (*CELLS, *full):
        if cell.refusal is None:
            parallel = ParallelConfig.parse(cell.layout)
            assert parallel.dp is not None
            assert SAMPLES % parallel.dp == 0, cell

"""The page of combinations is what the code says now."""

from pathlib import Path

import pytest

from mcore_models import ModelConfig
from mcore_parallel import ParallelConfig
from mcore_train.cli import main
from mcore_train.parity.cells import Cell, _refusal, table_matrix
from mcore_train.parity.table import combination_tables, find_rules

PAGE = Path(__file__).parents[3] / "docs" / "parallel-combinations.md"


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Made by `mcore-train parity --table`."""
    assert main(["parity", "--table"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| axis | values |")
    assert printed in PAGE.read_text()


def test_rules_explain_every_refusal_and_nothing_that_works() -> None:
    cells = list(table_matrix())
    rules = list(find_rules(cells))

    def is_named(cell: Cell) -> bool:
        return any(all(cell[a] == v for a, v in rule.values.items()) for rule in rules)

    assert [cell for cell in cells if is_named(cell) != (cell.refusal is not None)] == []
    # Half of what is asked of the three families without experts is about experts.
    assert sum(cell.refusal is None for cell in cells) > len(cells) / 3


def test_a_refusal_that_the_page_does_not_know_makes_it_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(model: ModelConfig, parallel: ParallelConfig) -> None:
        if model.mamba is not None and parallel.cp == 4:
            raise ValueError("a scan over four ranks")

    monkeypatch.setattr("mcore_train.parity.cells._refusal", _refusal.__wrapped__)
    monkeypatch.setattr("mcore_train.parity.cells.check_layout", check)
    tables = combination_tables()
    assert tables not in PAGE.read_text()
    assert "| `hybrid` with `cp=4,cp-kind=two-level:2` |" in tables
    assert "| a scan over four ranks |" in tables

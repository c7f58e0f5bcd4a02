"""The page of combinations is what the code says now."""

from pathlib import Path

import pytest

from mcore_train.cli import main
from mcore_train.parity.cells import Cell, table_matrix
from mcore_train.parity.table import find_rules

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

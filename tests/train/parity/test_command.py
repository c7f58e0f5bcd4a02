"""`mcore-train parity` over a matrix: what it prints, writes and refuses."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from mcore_parallel.testing import RankPool
from mcore_train.cli import main
from mcore_train.parity import Difference, Report
from mcore_train.parity.cells import Cell
from mcore_train.parity.covering import small_matrix
from mcore_train.parity.matrix import Matrix, Outcome, run_matrix


def outcomes(cells: Iterable[Cell]) -> Iterator[Outcome]:
    """The fourth one differs, and the fifth one ends with an error."""
    for i, cell in enumerate(cells):
        if i == 4:
            yield Outcome(cell=cell, error="RankDiedError: rank 1 was killed")
        else:
            wrong = Difference(kind="gradient", name="final_norm.weight", ratio=2e-3 * (i == 3))
            yield Outcome(
                cell=cell, report=Report(layout="", world_size=1, differences=(wrong,)), seconds=1.0
            )


def test_every_combination_is_a_line_and_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells = small_matrix()
    monkeypatch.setattr("mcore_train.parity.matrix.run_matrix", outcomes)
    monkeypatch.setattr("mcore_train.parity.matrix.small_matrix", lambda: cells)
    file = tmp_path / "rows.jsonl"
    command = ["parity", "--matrix", "small", "--json", str(file)]
    assert main(command) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line[8:].startswith(str(cell)) for line, cell in zip(lines, cells, strict=True)]
    assert lines[3].startswith("differs ")
    assert lines[3].endswith("2.0e-03 at most, first in gradient final_norm.weight")
    assert lines[4] == f"fails   {cells[4]}: RankDiedError: rank 1 was killed"
    assert total == (f"{len(cells)} combinations: {len(cells) - 2} equal, 1 differs, 1 fails")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["layout"] for row in rows] == [cell.layout for cell in cells]
    assert rows[3]["largest"] == {"gradient": 2e-3}
    assert rows[4]["reason"] == "RankDiedError: rank 1 was killed"
    assert main([*command[:-2], "--family", "gpt", "--part", "2/9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" equal")


def test_an_error_ends_one_combination_and_not_the_others(
    monkeypatch: pytest.MonkeyPatch, ranks: RankPool
) -> None:
    def run(self: Matrix, cell: Cell) -> Outcome:
        if cell["family"] == "moe":
            raise TimeoutError("two\nlines")
        return Outcome(cell=cell)

    monkeypatch.setattr(Matrix, "run", run)
    found = list(run_matrix([Cell.of({"family": family}) for family in ("gpt", "moe", "hybrid")]))
    assert [outcome.error for outcome in found] == [None, "TimeoutError: two lines", None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--matrix small --layout tp=2", "--layout is for a --config"),
        ("--matrix small --train-steps 2", "--train-steps is for a --config"),
        ("--matrix small --seed 3", "--seed is for a --config"),
        ("--matrix small --part 3/2", "part '3/2' is not of the form I/N"),
        ("--matrix small --family gtp", "family 'gtp': known are gpt, moe, hybrid, bert, t5"),
        ("--config tiny --layout tp=2 --part 1/2", "--part is for --matrix"),
        ("--config tiny", "--config needs at least one --layout"),
        ("--config tiny --layout tp=2 --train-steps 0", "--train-steps 0 must be at least 1"),
        ("--table --json x", "--json is for --matrix"),
    ],
)
def test_options_that_do_not_belong_together(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(["parity", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

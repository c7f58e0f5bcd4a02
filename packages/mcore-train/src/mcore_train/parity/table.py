"""The page of combinations: which of them work, and why the others do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from mcore_train.parity.cells import TABLE_AXES, Cell, table_matrix
from mcore_train.parity.parts import part_table

_FIRST = {
    "tensor": "tp=1",
    "pipeline": "pp=1",
    "context": "cp=1",
    "experts": "ep=1",
    "replica": "replicas=1",
}
_TABLES = (
    ("family", "context"),
    ("family", "experts"),
    ("pipeline", "level"),
    ("pipeline", "context"),
    ("level", "replica"),
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The fewest values with which nothing goes together, and what a user is told."""

    values: Mapping[str, str]
    reason: str
    count: int


def combination_tables() -> str:
    """Return tables in Markdown: the values, which two go together, and what is refused.

    Then which axis each part of a layer goes with.
    """
    cells = list(table_matrix())
    rules = list(find_rules(cells))
    good = sum(cell.refusal is None for cell in cells)
    lines = ["| axis | values |", "|---|---|"]
    for axis, values in TABLE_AXES.items():
        lines.append(f"| {axis} | {', '.join(_named(axis, value) for value in values)} |")
    lines += ["", f"Of these {len(cells)} combinations {good} work. ✓: the two values go together,"]
    lines += ["with every value of the other axes that no refusal below names."]
    for rows, columns in _TABLES:
        lines += ["", *_table(rules, rows, columns)]
    lines += ["", "| refusal | what | combinations | reason |", "|---|---|---|---|"]
    for number, rule in enumerate(rules, 1):
        what = " with ".join(_named(axis, value) for axis, value in rule.values.items())
        lines.append(f"| {number} | {what} | {rule.count} | {rule.reason} |")
    lines += ["", "### Parts of layers", "", *part_table()]
    return "\n".join(lines) + "\n"


def find_rules(cells: Sequence[Cell]) -> Iterator[Rule]:
    """Yield rules that explain every refusal, those of few values first."""
    left = {cell.values for cell in cells if cell.refusal is not None}
    for size in range(1, len(TABLE_AXES) + 1):
        for axes in combinations(TABLE_AXES, size):
            groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
            for cell in cells:
                groups[tuple(cell[axis] for axis in axes)].append(cell)
            for values, group in groups.items():
                refusals = [cell.refusal for cell in group]
                new = left.intersection(cell.values for cell in group)
                if new and all(refusals):
                    left -= new
                    rule = dict(zip(axes, values, strict=True))
                    yield Rule(values=rule, reason=str(refusals[0]), count=len(group))


def _table(rules: Sequence[Rule], rows: str, columns: str) -> Iterator[str]:
    names = [_named(columns, value) for value in TABLE_AXES[columns]]
    yield f"| {rows} | {' | '.join(names)} |"
    yield "|---|" + "---|" * len(names)
    for row in TABLE_AXES[rows]:
        found = [_entry(rules, {rows: row, columns: column}) for column in TABLE_AXES[columns]]
        yield f"| {_named(rows, row)} | {' | '.join(found)} |"


def _entry(rules: Sequence[Rule], pair: Mapping[str, str]) -> str:
    """Whether the two go together, in part (with a rule of more axes), or not."""
    whole = [i for i, rule in enumerate(rules, 1) if rule.values.items() <= pair.items()]
    part = [i for i, rule in enumerate(rules, 1) if rule.values.items() > pair.items()]
    if whole:
        return f"refusal {whole[0]}"
    return "✓" + "".join(f", but refusal {number}" for number in part)


def _named(axis: str, value: str) -> str:
    return f"`{value or _FIRST[axis]}`"

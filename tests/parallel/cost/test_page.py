"""docs/scaling.md shows what its commands print. As a program: run them, and write that down."""

import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel.cli import main
from mcore_parallel.cost.command import cost_lines

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "scaling.md"
SHOWN = re.compile(r"```sh\n(mcore-parallel .*?)```\n\n```text\n(.*?)```", re.DOTALL)
ROW = re.compile(
    r"^ *(\d+) +(\d+) +([\d.]+) +([\d.]+)% +([\d.]+) .*?  "
    r"(tp=.*) micro-batch=(\d+) recompute=(\S+)$"
)


def run(command: str, *further: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*shlex.split(command)[1:], *further]) == 0, command
    return out.getvalue()


def blocks() -> list[tuple[list[str], str]]:
    return [(commands.splitlines(), text) for commands, text in SHOWN.findall(PAGE.read_text())]


def shown_for(word: str) -> list[tuple[str, str]]:
    return [(lines[0], text) for lines, text in blocks() if lines[0].split()[1] == word]


@pytest.fixture(scope="module")
def published() -> Any:
    return json.loads(run("mcore-parallel cost --published", "--json"))


def test_page_has_its_commands() -> None:
    assert len(blocks()) == 8
    for name in re.findall(r"--png (\S+)", PAGE.read_text()):
        image = ROOT / name
        assert image.read_bytes().startswith(b"\x89PNG")
        assert f"({image.relative_to(PAGE.parent)})" in PAGE.read_text()


def test_measured_steps_are_met(published: Any) -> None:
    rows = published["published"]
    errors = sorted(abs(row["error"]) for row in rows)
    assert len(errors) >= 20
    assert len({row["source"] for row in rows}) >= 5
    assert errors[-1] < 0.25
    assert errors[len(errors) * 3 // 4] < 0.11
    assert sum(errors) / len(errors) < 0.08
    large = [row["error"] for row in rows if row["world"] > 1000 and row["machine"][0] == "h"]
    assert len(large) >= 7
    assert max(map(abs, large)) < 0.12


def test_the_table_of_measured_steps_is_current(published: Any) -> None:
    ((_, text),) = [pair for pair in shown_for("cost") if "--published" in pair[0]]
    assert text == "\n".join(cost_lines(published)) + "\n"


def test_single_estimates_are_current() -> None:
    seen = 0
    for lines, text in blocks():
        if "--layout" in lines[0]:
            assert text == "\n".join(run(line) for line in lines)
            seen += 1
    assert seen == 2


@pytest.mark.parametrize("command", [command for command, _ in shown_for("scaling")])
def test_rows_of_the_tables_are_current(command: str) -> None:
    """The fastest layouts are as fast as the page says; NIGHTLY: and are the fastest."""
    text = dict(shown_for("scaling"))[command]
    given = shlex.split(command)
    if os.environ.get("NIGHTLY"):
        at = given.index("--png")
        assert text == run(shlex.join([*given[:at], *given[at + 2 :]]))
        return
    kept = [
        word
        for name in ("--model", "--seq-length", "--precision", "--dispatch")
        if name in given
        for word in given[given.index(name) :][:2]
    ]
    rows = [match for line in text.splitlines() if (match := ROW.match(line))]
    assert len(rows) >= 4
    for row in (rows[0], rows[-1]):
        world, batch, step, utilization, gib, layout, micro, recompute = row.groups()
        asked = ["--world", world, "--batch", batch, "--layout", layout]
        asked += ["--micro-batch", micro, "--recompute", recompute, "--json"]
        (found,) = json.loads(run(shlex.join(["x", "cost", *kept, *asked])))["estimates"]
        assert f"{found['step']:.2f}" == step
        assert f"{found['utilization']:.1%}" == f"{utilization}%"
        assert f"{found['memory']['total'] / 2**30:.1f}" == gib


def write() -> None:
    """Write the outputs of all commands of the page into it, and draw its pictures."""
    os.chdir(ROOT)

    def shown(match: re.Match[str]) -> str:
        commands = match[1].splitlines()
        print(*commands, sep="\n", flush=True)
        output = "\n".join(run(line) for line in commands)
        return f"```sh\n{match[1]}```\n\n```text\n{output}```"

    PAGE.write_text(SHOWN.sub(shown, PAGE.read_text()))


if __name__ == "__main__":
    write()

"""Every code block of the READMEs and guides runs: Python as it stands, shell line by line.

Python blocks of one file share one process, in order, in an empty folder; one that begins with a
comment `# NAME.py` is that file, beside the others. The pages of `TOPICS` share one process.
Shell blocks run with `uv run X` as `X` from this environment. What needs a network (`pip install`,
`git clone`) or is this suite itself is not run again, nor what has tests of its own: the quickstart
(tests/system/test_quickstart.py) and the doctor, which holds every operator to its specification
(tests/kernels/test_bench.py, tests/kernels/testing/test_conformance.py).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "docs/architecture.md",
        *ROOT.glob("packages/*/README.md"),
        ROOT / "docs/low-precision.md",
        ROOT / "docs/own-parts.md",
        *ROOT.glob("docs/guides/*.md"),
    ]
)
TOPICS = sorted(set(ROOT.glob("docs/*.md")) - set(PAGES))
"""Pages on one topic each, with a short example or two, or none."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.py)\n")
ELSEWHERE = (
    *("pip install", "git clone", "uv sync", "pytest", "cd ", "make "),
    *("mcore-train quickstart", "mcore-kernels doctor"),
)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def run(command: list[str], folder: Path, timeout: int = 240) -> None:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def shell_lines(page: Path) -> list[str]:
    lines: list[str] = []
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            text = line.partition(" # ")[0].strip()
            parts = [part.strip().removeprefix("uv run ") for part in text.split("&&")]
            parts = [part for part in parts if part and not part.startswith((*ELSEWHERE, "#"))]
            lines += parts
    return lines


def test_pages_were_found_and_have_code() -> None:
    assert len(PAGES) >= 9
    for page in PAGES:
        assert blocks(page, "python") or blocks(page, "sh"), page
        kinds = {kind for kind, _ in BLOCK.findall(page.read_text())}
        assert kinds <= {"python", "sh", "text", "yaml"}, page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python")
    if not code:
        pytest.skip("no Python on this page")
    files: dict[str, list[str]] = {"page.py": []}
    for block in code:
        named = FILE.match(block)
        files.setdefault(named[1] if named else "page.py", []).append(block)
    for name, parts in files.items():
        (tmp_path / name).write_text("\n".join(parts))
    script = tmp_path / "page.py"
    run([sys.executable, str(script)], tmp_path)


EACH = """
import runpy, sys, traceback
for page in sys.argv[1:]:
    try:
        runpy.run_path(page)
    except BaseException:
        traceback.print_exc()
        sys.exit(page)
"""
"""Runs the files in turn: most of what an example takes is imports, which they share."""


def test_python_blocks_of_pages_on_one_topic_run(tmp_path: Path) -> None:
    scripts = []
    for page in TOPICS:
        if code := blocks(page, "python"):
            scripts.append(tmp_path / f"{page.stem.replace('-', '_')}.py")
            scripts[-1].write_text("\n".join(code))
    assert len(scripts) >= 10
    run([sys.executable, "-c", EACH, *map(str, scripts)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    lines = shell_lines(page)
    if not lines:
        pytest.skip("no commands to run on this page")
    for line in lines:
        run(["bash", "-euo", "pipefail", "-c", line], tmp_path)

"""The layering checks pass on this tree, and fail when an import breaks the layers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and of the import contracts."""
    shutil.copytree(
        ROOT / "packages", tmp_path / "packages", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run the import contracts over `tree` instead of the installed packages."""
    sources = ":".join(str(p) for p in (tree / "packages").glob("mcore-*/src"))
    return subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache", "--no-logo", str(tree / ".importlinter")],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )


def deps(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "tools" / "deps.py"), "--root", str(tree)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def plant(tree: Path, package: str, line: str) -> None:
    root = package.replace("-", "_")
    (tree / "packages" / package / "src" / root / "planted.py").write_text(
        f'"""Planted."""\n\n{line}\n'
    )


def test_contracts_hold(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout + result.stderr


PLANTED = [
    ("mcore-parallel", "mcore_models", "Imports go down only"),
    ("mcore-data", "mcore_train", "Imports go down only"),
    ("mcore-kernels", "mcore_parallel", "Imports go down only"),
    ("mcore-train", "mcore_inference", "Imports go down only"),
    ("mcore-ckpt", "mcore_data", "Imports go down only"),
    ("mcore-models", "triton", "Only mcore_kernels imports triton"),
    ("mcore-inference", "fastapi", "Only server modules"),
    ("mcore-data", "torch", "mcore_data runs without torch"),
]


def test_planted_imports_break_their_contracts(tree: Path) -> None:
    """All at once, since the linter reads every module each time; it names each of them."""
    for package in {package for package, _, _ in PLANTED}:
        lines = [f"import {name}" for planted, name, _ in PLANTED if planted == package]
        plant(tree, package, "\n".join(lines))
    result = lint(tree)
    assert result.returncode != 0
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    for package, name, contract in PLANTED:
        assert any(text.startswith(contract) for text in broken), result.stdout
        reasons = result.stdout.split(f"\n{contract}")[-1]
        step = f"{package.replace('-', '_')}.planted -> {name} (l."
        assert step in reasons, (step, result.stdout)


def test_every_import_is_declared(tree: Path) -> None:
    result = deps(tree)
    assert result.returncode == 0, result.stdout + result.stderr


def test_planted_undeclared_dependency_is_found(tree: Path) -> None:
    plant(tree, "mcore-models", "import yaml")
    plant(tree, "mcore-parallel", "import hypothesis")
    result = deps(tree)
    assert result.returncode != 0
    text = result.stdout + result.stderr
    assert "'yaml' imported but" in text
    assert "'hypothesis' imported but" in text

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


@pytest.mark.parametrize(
    ("package", "line", "contract"),
    [
        ("mcore-parallel", "import mcore_models", "Imports go down only"),
        ("mcore-data", "from mcore_train import config", "Imports go down only"),
        ("mcore-kernels", "import mcore_parallel", "Imports go down only"),
        ("mcore-train", "import mcore_inference", "Imports go down only"),
        ("mcore-ckpt", "import mcore_data", "Imports go down only"),
        ("mcore-models", "import triton", "Only mcore_kernels imports triton"),
        ("mcore-inference", "import fastapi", "Only server modules"),
        ("mcore-data", "import torch", "mcore_data runs without torch"),
    ],
)
def test_planted_import_breaks_a_contract(
    tree: Path, package: str, line: str, contract: str
) -> None:
    plant(tree, package, line)
    result = lint(tree)
    assert result.returncode != 0
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), result.stdout


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

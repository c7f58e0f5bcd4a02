"""The examples run, and the recipes of the repository are configs that fit their worlds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_train import check_run, load_config

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_own_model_learns_the_same_over_two_processes() -> None:
    alone = run("own_model.py")
    assert alone == run("own_model.py", "2", "zero=3")
    first, last = (float(word) for word in alone.replace("->", "").split()[1:])
    assert last < 0.5 * first


def test_own_model_is_short_and_needs_one_package() -> None:
    text = (ROOT / "examples" / "own_model.py").read_text()
    (train,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno < 30
    assert set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) == {
        *("sys", "torch", "mcore_parallel")
    }


def test_own_mixer() -> None:
    assert run("own_mixer.py").startswith("(2, 16, 100)")


@pytest.mark.parametrize(
    ("recipe", "world"), [("gpt2-124m", 8), ("llama3-8b-tp4-pp2", 8), ("llama3-8b-tp4-pp2", 512)]
)
def test_recipes_fit(recipe: str, world: int) -> None:
    instead = ["--data.mock", "true", "--data.split", "null"]
    config = load_config(ROOT / "recipes" / f"{recipe}.yaml", instead)
    plan = check_run(config, world)
    assert plan.micro_batches >= 1


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in (ROOT / "recipes").glob("*.yaml")} == {
        "gpt2-124m",
        "llama3-8b-tp4-pp2",
        "rl_toy",  # by tests/rl/test_config.py
    }

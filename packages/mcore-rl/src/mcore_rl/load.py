"""From YAML and dotted overrides to a checked `RLConfig`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.config import RLConfig
from mcore_train.load import from_tree, load_as
from mcore_train.load import recipe_names as names_in

RECIPES = Path(__file__).parent / "recipes"


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RLConfig:
    """Read a config and check it as a whole; see `mcore_train.load_config`.

    `source` is a YAML file, the name of a recipe that this package ships, or a mapping.
    """
    return load_as(RLConfig, source, overrides, recipes=RECIPES)


def config_from_tree(tree: Mapping[str, Any]) -> RLConfig:
    """Convert and check nested plain values; `mcore_train.config_to_tree` makes them."""
    return from_tree(RLConfig, tree)


def recipe_names() -> list[str]:
    """The recipes that this package ships."""
    return names_in(RECIPES)

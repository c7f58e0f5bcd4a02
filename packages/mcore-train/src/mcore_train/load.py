"""From YAML and dotted overrides to a checked config: `TrainConfig`, or another such dataclass.

The dataclasses are the only source of names, types and defaults; pydantic converts and reports.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from mcore_models import preset
from mcore_train.config import TrainConfig, nearest

RECIPES = Path(__file__).parent / "recipes"
C = TypeVar("C")


def load_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> TrainConfig:
    """Read a config and check it as a whole.

    Args:
        source: a YAML file, the name of a recipe that this package ships, or a mapping.
        overrides: `["--model.num_layers", "8", "--steps=100"]`, read as YAML values.

    Raises:
        ValueError: one line; an unknown key names the nearest valid one.
    """
    return load_as(TrainConfig, source, overrides, recipes=RECIPES)


def load_as(
    kind: type[C],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    recipes: Path,
) -> C:
    """Read a config of another kind in the same way.

    `kind` is a dataclass of dataclasses and plain values; its field `model`, if any, may start from
    a preset. `recipes` is the folder of the YAML files that can be given by name. Errors as in
    `load_config`.
    """
    tree = dict(source) if isinstance(source, Mapping) else _read(source, recipes)
    for path, value in parse_overrides(overrides):
        _set(tree, path, value)
    return from_tree(kind, tree)


def config_from_tree(tree: Mapping[str, Any]) -> TrainConfig:
    """Convert and check nested plain values.

    `model: {preset: NAME, …}` starts from a preset, `model: {hf: FOLDER, …}` from the `config.json`
    of a Hugging Face folder, `model: {checkpoint: FOLDER, …}` from what a checkpoint was trained
    with.
    """
    return from_tree(TrainConfig, tree)


def from_tree(kind: type[C], tree: Mapping[str, Any]) -> C:
    """Convert and check nested plain values as a config of this kind (see `load_as`)."""
    tree = dict(tree)
    model = tree.get("model")
    if isinstance(model, Mapping):
        bases = {"preset": _preset, "hf": _hf, "checkpoint": _checkpoint}
        given = [key for key in bases if key in model]
        if len(given) > 1:
            names = " and ".join(f"model.{key}" for key in given)
            raise ValueError(f"{names}: each says what the model starts from, give one")
        for key in given:
            base = bases[key](str(model[key]))
            tree["model"] = _merged(base, {k: v for k, v in model.items() if k != key})
    tree = _checked(tree, kind, "", root=kind)
    try:
        config: C = _adapter(cast(Any, kind)).validate_python(tree)
    except ValidationError as error:
        raise ValueError(_first_line(error)) from None
    return config


@cache  # to make one takes many times what a check does
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _preset(name: str) -> dict[str, Any]:
    return dataclasses.asdict(preset(name))


def _hf(folder: str) -> dict[str, Any]:
    from mcore_train.from_hf import architecture_of  # it loads what trains

    return architecture_of(folder)


def _checkpoint(folder: str) -> dict[str, Any]:
    import mcore_ckpt  # it loads torch

    try:
        model = mcore_ckpt.read_state(folder)["config"]["model"]
    except FileNotFoundError as error:
        raise ValueError(f"model.checkpoint={folder}: {error}") from None
    except (KeyError, TypeError):
        raise ValueError(f"model.checkpoint={folder} has no architecture in its state") from None
    return dict(model)


def config_to_tree(config: object) -> dict[str, Any]:
    """Return nested JSON-able values from which `config_from_tree` makes the same config.

    For a config of another kind it is `from_tree`.
    """
    tree = TypeAdapter(type(config)).dump_python(config, mode="json")
    assert isinstance(tree, dict)
    return tree


def parse_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Any]]:
    """Parse `--a.b value` and `--a.b=value` pairs; values are YAML (`8`, `null`, `[1, 2]`).

    Raises:
        ValueError: an argument without `--` or without a value.
    """
    parsed: list[tuple[list[str], Any]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(f"unexpected argument {word!r}: overrides are written --a.b VALUE")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ValueError(f"--{key} needs a value")
            text = words.pop(0)
        parsed.append((key.replace("-", "_").split("."), _yaml_value(text)))
    return parsed


def recipe_names(recipes: Path = RECIPES) -> list[str]:
    """The recipes that this package ships, or those of another folder."""
    return sorted(path.stem for path in recipes.glob("*.yaml"))


def _yaml_value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:  # YAML 1.1 reads 2e-3 as text
            return float(value)
        except ValueError:
            return value
    return value


def _read(source: str | Path, recipes: Path) -> dict[str, Any]:
    path, names = Path(source), recipe_names(recipes)
    if path.suffix not in {".yaml", ".yml"}:
        if str(source) not in names:
            raise ValueError(
                f"no recipe {str(source)!r}: did you mean {nearest(str(source), names)!r}? "
                f"Recipes: {', '.join(names)}; a file ends in .yaml"
            )
        path = recipes / f"{source}.yaml"
    if not path.is_file():
        what = "a folder, not a file" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}")
    try:
        tree = yaml.safe_load(path.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: the top of a config is a mapping, not {type(tree).__name__}")
    return {key: _floats(value) for key, value in tree.items()}


def _floats(tree: Any) -> Any:
    """Read `2e-3` as a number wherever it stands (YAML 1.1 wants `2.0e-3`)."""
    if isinstance(tree, dict):
        return {key: _floats(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_floats(value) for value in tree]
    if isinstance(tree, str) and tree[:1] in "+-.0123456789":
        return _yaml_value(tree)
    return tree


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` in it; mappings on both sides are merged."""
    merged = {**base, **changes}
    for key in base.keys() & changes.keys():
        if isinstance(base[key], Mapping) and isinstance(changes[key], Mapping):
            merged[key] = _merged(base[key], changes[key])
    return merged


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for position, key in enumerate(path[:-1]):
        inner = tree.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            raise ValueError(f"--{'.'.join(path)}: {'.'.join(path[: position + 1])} has no fields")
        tree[key] = dict(inner or {})
        tree = tree[key]
    tree[path[-1]] = value


def _checked(tree: Mapping[str, Any], kind: Any, place: str, *, root: Any) -> dict[str, Any]:
    """Return the tree with plain values as their fields take them; `root` is the whole config.

    Numbers become text where a field is text (a folder named 2024), and text becomes words where a
    field is a row of words (`pattern: "*- *-"`).
    """
    checked: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for key, value in tree.items():
        if key not in names:
            raise ValueError(f"unknown key {place}{key}: {_advice(str(key), names, place, root)}")
        if isinstance(value, Mapping) and (inner := _dataclass_in(hints[key])) is not None:
            checked[key] = _checked(value, inner, f"{place}{key}.", root=root)
        elif isinstance(value, int | float) and _is_text(hints[key]):
            checked[key] = str(value)
        elif isinstance(value, str) and _is_words(hints[key]):
            checked[key] = value.split()
        elif isinstance(value, list) and _is_words(hints[key]):
            checked[key] = [str(word) for word in value]  # `[0.3, code, 0.7, web]`
        else:
            checked[key] = value
    return checked


def _advice(key: str, names: list[str], place: str, root: Any) -> str:
    """What may have been meant: a field of this name elsewhere, or of a name like it."""
    everywhere = _places(root)
    leaves = {path.rpartition(".")[2] for path in everywhere}
    found = [path for path in everywhere if path.rpartition(".")[2] == key]
    if not found:
        found = [f"{place}{name}" for name in difflib.get_close_matches(key, names, n=1)]
    if not found and (like := difflib.get_close_matches(key, leaves, n=1, cutoff=0.75)):
        found = [path for path in everywhere if path.rpartition(".")[2] == like[0]]
    if not found:
        return f"known {'in ' + place[:-1] if place else 'at the top'} are {', '.join(names)}"
    *first, last = found[:4]
    return f"did you mean {', '.join(first) + ' or ' if first else ''}{last}?"


def _places(kind: Any, place: str = "") -> list[str]:
    """The dotted names of all fields of a config."""
    hints = typing.get_type_hints(kind)
    places = []
    for name in (field.name for field in dataclasses.fields(kind)):
        inner = _dataclass_in(hints[name])
        places += [f"{place}{name}"] if inner is None else _places(inner, f"{place}{name}.")
    return places


def _is_words(hint: Any) -> bool:
    """Whether a field is a row of words, or may be one."""
    return tuple[str, ...] in (hint, *typing.get_args(hint))


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a field holds, alone or as `Part | None`; None for other fields."""
    kinds = typing.get_args(hint) or (hint,)
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)


def _is_text(hint: Any) -> bool:
    kinds = set(typing.get_args(hint) or (hint,)) - {type(None)}
    return bool(kinds) and kinds <= {str, Path}


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{place}: {message}" if place else message
    return f"{place}: {message[:1].lower()}{message[1:]} (got {first['input']!r})"

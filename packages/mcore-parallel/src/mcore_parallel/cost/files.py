"""Shapes and machines as JSON, so that models and clusters of one's own can be planned.

A shape lists runs of equal layers; every part names its kind:

    {"hidden_size": 4096, "vocab_size": 32000, "layers": [{"count": 32, "vectors": 8192, "parts": [
     {"kind": "attention", "num_heads": 32, "kv_heads": 8, "head_size": 128},
     {"kind": "mlp", "width": 14336}]}]}

A machine says what it is like, and where it differs:

    {"like": "h100", "name": "mine", "inter": {"bandwidth": 20e9, "latency": 2e-5}}
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from mcore_parallel.cost.architecture import LayerShape, ModelShape
from mcore_parallel.cost.machines import Link, Machine, Rate, machine
from mcore_parallel.cost.parts import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    MambaShape,
    MLPShape,
)
from mcore_parallel.cost.shapes import shape

_KINDS = {
    "attention": AttentionShape,
    "mamba": MambaShape,
    "delta_net": DeltaNetShape,
    "mlp": MLPShape,
    "experts": ExpertsShape,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def shape_to_json(model: ModelShape) -> dict[str, Any]:
    """Return a shape in the form that `shape_from_json` reads."""
    layers = []
    for layer, run in groupby(model.layers):
        parts = [_part(part) for part in layer.parts]
        layers.append({"count": len(list(run)), "vectors": layer.vectors, "parts": parts})
    return {**_set_fields(model, leave_out=("layers",)), "layers": layers}


def shape_from_json(data: Any) -> ModelShape:
    """Return the shape that such a value describes; ValueError names the place that is wrong."""
    values = _object(data, "a shape")
    layers: list[LayerShape] = []
    runs = values.pop("layers", None)
    if not isinstance(runs, list):
        raise ValueError("a shape needs layers, a list of runs of equal layers")
    for number, run in enumerate(runs):
        where = f"layers[{number}]"
        fields = _object(run, where)
        count = fields.pop("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{where}.count must be a whole number of at least 1, not {count!r}")
        described = fields.pop("parts", None)
        if not isinstance(described, list):
            raise ValueError(f"{where} needs parts, a list of the parts of such a layer")
        parts = tuple(_read_part(part, f"{where}.parts[{i}]") for i, part in enumerate(described))
        layers += [_make(LayerShape, {**fields, "parts": parts}, where)] * count
    found = _make(ModelShape, {**values, "layers": tuple(layers)}, "the shape")
    assert isinstance(found, ModelShape)
    return found


def read_shape(name: str) -> ModelShape:
    """Return the shape of a name in `SHAPES`, or of a file that ends in .json."""
    if not name.endswith(".json"):
        return shape(name)
    return shape_from_json(_read(name))


def read_machine(name: str) -> Machine:
    """Return the machine of a name in `MACHINES`, or of a file that ends in .json."""
    if not name.endswith(".json"):
        return machine(name)
    values = _object(_read(name), f"{name}")
    like = values.pop("like", None)
    if not isinstance(like, str):
        raise ValueError(f'{name} needs "like", the name of a machine to start from')
    for key, kind in (("intra", Link), ("inter", Link), ("bf16", Rate), ("fp8", Rate)):
        if values.get(key) is not None:
            values[key] = _make(kind, _object(values[key], key), key)
    base = machine(like)
    known = {field.name: getattr(base, field.name) for field in dataclasses.fields(Machine)}
    _check_names(values, known, name)
    return dataclasses.replace(base, **values)


def _read(name: str) -> Any:
    try:
        return json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _part(part: Any) -> dict[str, Any]:
    fields = _set_fields(part)
    for name in ("expert", "shared"):
        if name in fields:
            fields[name] = _part(fields[name])
    return {"kind": _NAMES[type(part)], **fields}


def _set_fields(value: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields that differ from their default."""
    fields = [field for field in dataclasses.fields(value) if field.init]
    return {
        field.name: getattr(value, field.name)
        for field in fields
        if field.name not in leave_out and getattr(value, field.name) != field.default
    }


def _read_part(data: Any, where: str) -> Any:
    fields = _object(data, where)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"{where}.kind {kind!r}: known are {', '.join(_KINDS)}")
    for name in ("expert", "shared"):
        if fields.get(name) is not None:
            fields[name] = _read_part(fields[name], f"{where}.{name}")
    return _make(_KINDS[kind], fields, where)


def _make(kind: type[Any], fields: dict[str, Any], where: str) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    _check_names(fields, known, where)
    missing = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and name not in fields
    ]
    if missing:
        raise ValueError(f"{where} needs {', '.join(missing)}")
    for name, value in fields.items():
        number = known[name].type in ("int", "float")
        if number and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{where}.{name} must be a number, not {value!r}")
    return kind(**fields)


def _check_names(fields: dict[str, Any], known: Any, where: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no {name!r}: {hint}known are {', '.join(known)}")


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object with named fields, not {data!r}")
    return dict(data)

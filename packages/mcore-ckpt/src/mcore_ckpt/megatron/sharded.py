"""Sharded checkpoints of Megatron-LM: `torch_dist`, and `fsdp_dtensor`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.dcp.source import DcpFolder
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.megatron.family import Family
from mcore_ckpt.megatron.flat import Run, bucket_states
from mcore_ckpt.megatron.keys import apart, sort_keys
from mcore_ckpt.megatron.pieces import Common, Pieces, resolved, step_of
from mcore_ckpt.megatron.place import Degrees
from mcore_ckpt.sources import metas
from mcore_ckpt.torchfile import load_file
from mcore_parallel.mapping import Mapped

_COMMON = "common.pt"
_COMMON_STATE = re.compile(r"common_state(/.*)?")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\b.*\.optimizer/.*")
_FSDP_STATE = re.compile(r"optimizer\.(?:state\.)?(?P<name>.+)\.(?P<state>exp_avg|exp_avg_sq)")
_FSDP_STEP = re.compile(r"optimizer\..*\bstep")
_WRAPPERS = re.compile(r"(?:model\d*\.)?(?:module\.)*(?P<name>.+)")


def open_torch_dist(folder: Path, family: Family, optimizer: bool) -> Pieces:
    """Open a `torch_dist` checkpoint; errors as `MegatronCheckpoint.open`."""
    source = DcpFolder(folder)
    common, where = _common(folder, source)
    model = common.model(family, where)
    keys = sort_keys(source)
    known = metas(source)
    states: dict[str, dict[str, Mapped]] = {}
    step = None
    if optimizer:
        shapes = {name: known[key].shape for name, key in keys.weights.items()}
        for kind, named in keys.states.items():
            states[kind] = dict(_canonical(family, apart(named, known, shapes)))
        if keys.buckets:
            degrees = Degrees.of(common.args)
            run = Run(family=family, model=model, degrees=degrees, where=str(folder))
            states |= bucket_states(keys.buckets, source, run)
        step = _step(common, source)
    return Pieces(
        model=model,
        source=source,
        weights=resolved(dict(_canonical(family, apart(keys.weights, known)))),
        states={kind: resolved(tensors) for kind, tensors in states.items()},
        iteration=common.iteration,
        optimizer_step=step,
        consumed_samples=common.consumed_samples,
    )


def _common(folder: Path, source: DcpFolder) -> tuple[Common, Path]:
    """Return what is kept once: in a file of its own, or in newer checkpoints among the objects."""
    path = folder / _COMMON
    if path.is_file():
        return Common.of(load_file(path), path), path
    for name in source.objects:
        if _COMMON_STATE.fullmatch(name):
            value = source.object(name)
            while isinstance(value, list) and len(value) == 1:
                value = value[0]
            return Common.of(value, folder), folder
    raise CheckpointError(f"{folder} has neither {_COMMON} nor a common_state object")


def _step(common: Common, source: DcpFolder) -> int | None:
    found = step_of(common.rest.get("optimizer"))
    for name in source.objects:
        if found is None and _OPTIMIZER.fullmatch(name):
            found = step_of(source.object(name))
    return found


def _canonical(
    family: Family, tensors: Iterator[tuple[str, Mapped]]
) -> Iterator[tuple[str, Mapped]]:
    for name, tensor in tensors:
        found = family.canonical(name, 0, 0)
        if found is not None:
            yield found, tensor


def open_fsdp(folder: Path, family: Family, optimizer: bool) -> Pieces:
    """Open an `fsdp_dtensor` checkpoint; errors as `MegatronCheckpoint.open`.

    Keys are those of modules in their wrappers; the gate and the rest of an MLP's first layer are
    apart, as `weight_w` and `weight_v`.
    """
    source = DcpFolder(folder)
    common = Common.of(_top(source), folder)
    model = common.model(family, folder)
    known = metas(source)
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    for key in source:
        if match := _FSDP_STATE.fullmatch(key):
            states[match["state"]][_unwrapped(match["name"])] = key
        elif not key.startswith(("optimizer", "rng_state", "rerun_state")):
            weights[_unwrapped(key)] = key

    def tensors(named: Mapping[str, str]) -> dict[str, Mapped]:
        return dict(_canonical(family, apart(named, known)))

    return Pieces(
        model=model,
        source=source,
        weights=resolved(tensors(weights)),
        states={k: resolved(tensors(named)) for k, named in states.items()} if optimizer else {},
        iteration=common.iteration,
        optimizer_step=_fsdp_step(source),
        consumed_samples=common.consumed_samples,
    )


def _top(source: DcpFolder) -> dict[str, Any]:
    """Return the arguments and the iteration: objects, the arguments as one or each by itself."""
    top: dict[str, Any] = {}
    for key in source.objects:
        name, dot, rest = key.partition(".")
        if name not in ("args", "iteration"):
            continue
        value = source.object(key)
        if dot:
            top.setdefault(name, {})[rest] = value
        else:
            top[name] = value
    return top


def _unwrapped(key: str) -> str:
    match = _WRAPPERS.fullmatch(key)
    assert match is not None
    return match["name"]


def _fsdp_step(source: DcpFolder) -> int | None:
    for key in source.objects:
        if _FSDP_STEP.fullmatch(key):
            return int(source.object(key))
        if key == "optimizer.param_groups":
            return step_of({"param_groups": source.object(key)})
    for key in source:
        if _FSDP_STEP.fullmatch(key):
            return int(source.read(key))
    return None

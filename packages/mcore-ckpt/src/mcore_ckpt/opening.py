"""A model under our names, wherever it is read from: what `convert` begins with."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.addresses import Address, Place, local_path
from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.commit import find_below
from mcore_ckpt.dcp.metadata import METADATA
from mcore_ckpt.dcp.source import DcpFolder
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.hf.architecture import Architecture, find_architecture
from mcore_ckpt.hf.config import check_shapes
from mcore_ckpt.hf.folder import CONFIG, HFFolder
from mcore_ckpt.hf.source import read_json
from mcore_ckpt.megatron import MegatronCheckpoint
from mcore_ckpt.megatron.finding import TRACKER, find_checkpoint
from mcore_ckpt.sources import CheckpointWeights, MappedSource, TensorSource, metas
from mcore_parallel.mapping import Mapped, Resolved, TensorMeta

TOKENIZER, CONFIGS = "tokenizer/", "hf/"
STATE = "state"
"""The object of a DCP folder of ours that has what is no tensor, as JSON."""

_MOMENT = re.compile(r"(?:app\.)?optim(?:izer)?\.state\.(.+)\.(\w+)")


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model under our names.

    model: as JSON, the way a checkpoint's state has it under `config.model`. files: beside the
    tensors: `tokenizer/…`, and `hf/config.json` and others as they came from Hugging Face.
    moments: optimizer state by its kind, under the names of the weights. optimizer_step: how many
    steps it has seen.
    """

    source: TensorSource
    model: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)
    step: int = 0
    moments: Mapping[str, TensorSource] = field(default_factory=dict)
    optimizer_step: int | None = None

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint of it: its architecture, and how far it was trained."""
        config: dict[str, Any] = {"model": dict(self.model)}
        if not self.moments:
            return {"config": config}
        steps = self.step if self.optimizer_step is None else self.optimizer_step
        if {*self.moments} == {"exp_avg", "exp_avg_sq"}:
            config["optimizer"] = {"kind": "adamw"}
        names = sorted(self.moments)
        optimizer = {"step": steps, "state_names": names}
        return {"config": config, "step": self.step, "optimizer": optimizer}


def open_weights(
    kind: str, path: Place, known: Mapping[str, Architecture] | None, *, moments: bool
) -> Weights:
    """Open what is at a path; errors as `convert`. moments: look at optimizer state, too."""
    if kind == "auto":
        kind = detect(path)
    if kind == "native":
        return _open_native(path, moments)
    path = local_path(path)
    if kind == "hf":
        return _open_hf(path, known)
    if kind == "dcp":
        return _open_dcp(path, known, moments)
    return _open_megatron(path, moments)


def detect(path: Place) -> str:
    """Return the kind of checkpoint that is at a path; FileNotFoundError when it is none known."""
    if isinstance(path, Address):
        return "native"
    if (path / METADATA).is_file() and not (path / "metadata.json").is_file():
        return "megatron" if "args" in _top(DcpFolder(path).objects) else "dcp"
    if (path / CONFIG).is_file():
        return "hf"
    if (path / TRACKER).is_file():
        return "megatron"
    if find_below(path) is not None:
        return "native"
    try:
        find_checkpoint(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} holds no checkpoint of a kind that is known: neither {CONFIG}, a committed "
            f"checkpoint of ours, {METADATA}, nor mp_rank_… folders"
        ) from None
    return "megatron"


def _top(names: Any) -> set[str]:
    return {re.split(r"[./]", name)[0] for name in names}


def _open_hf(path: Path, known: Mapping[str, Architecture] | None) -> Weights:
    folder = HFFolder.open(path, known=known)
    tensors = folder.tensors()
    source = MappedSource(tensors, folder.mapping.forward(metas(tensors)))
    source.check_repeats()
    files = {TOKENIZER + name: data for name, data in folder.files().items()}
    files |= {CONFIGS + name: data for name, data in folder.configs().items()}
    return Weights(source=source, model=folder.architecture.to_tree(folder.model), files=files)


def _open_native(path: Place, moments: bool) -> Weights:
    checkpoint = Checkpoint(path)
    try:
        model = checkpoint.state["config"]["model"]
    except (KeyError, TypeError):
        raise ValueError(f"{checkpoint.path} has no model architecture in its state") from None
    files = {
        name: checkpoint.file(name)
        for name in checkpoint.manifest.files
        if name.startswith((TOKENIZER, CONFIGS))
    }
    optimizer = checkpoint.state.get("optimizer") or {}
    names = optimizer.get("state_names", ()) if moments else ()
    return Weights(
        source=CheckpointWeights(checkpoint),
        model=model,
        files=files,
        step=checkpoint.step,
        moments={name: CheckpointWeights(checkpoint, f"{name}/") for name in names},
        optimizer_step=optimizer.get("step"),
    )


def _open_megatron(path: Path, moments: bool) -> Weights:
    found = MegatronCheckpoint.open(path, optimizer=moments)
    return Weights(
        source=found.weights,
        model=found.model,
        step=found.iteration,
        moments=found.moments,
        optimizer_step=found.optimizer_step,
    )


def _open_dcp(path: Path, known: Mapping[str, Architecture] | None, moments: bool) -> Weights:
    """Open a folder that `convert` wrote, or one of Hugging Face's names beside a `config.json`."""
    folder = DcpFolder(path)
    if STATE in folder.objects:
        return _open_own_dcp(folder, moments)
    where = next((at for at in (path / CONFIG, path.parent / CONFIG) if at.is_file()), None)
    if where is None:
        raise ValueError(
            f"{path} does not say what model it is of: put the {CONFIG} of its architecture there"
        )
    config = read_json(where)
    architecture = find_architecture(config, str(where), known)
    try:
        model = architecture.read_config(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    shapes, mapping = architecture.shapes(model), architecture.mapping(model)
    ours = {name: TensorMeta(shape, torch.float32) for name, shape in shapes.items()}
    expected = set(mapping.inverse(ours).tensors)
    prefix = _prefix(folder, expected)
    named = {key.removeprefix(prefix): key for key in folder if key.startswith(prefix)}
    weights = {name: key for name, key in named.items() if not _MOMENT.fullmatch(key)}
    source = MappedSource(_chosen(folder, weights), mapping.forward(_metas(folder, weights)))
    source.check_repeats()
    try:
        check_shapes(metas(source), shapes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    states: dict[str, dict[str, str]] = defaultdict(dict)
    for key in folder if moments else ():
        match = _MOMENT.fullmatch(key)
        if match and match[2] != "step":
            states[match[2]][match[1].removeprefix(prefix)] = key
    return Weights(
        source=source,
        model=architecture.to_tree(model),
        files={CONFIGS + CONFIG: where.read_bytes()},
        moments={
            kind: MappedSource(_chosen(folder, named), mapping.forward(_metas(folder, named)))
            for kind, named in states.items()
        },
        optimizer_step=_dcp_step(folder) if states else None,
    )


def _dcp_step(folder: DcpFolder) -> int | None:
    """Return the step count of the first weight, as torch's optimizers keep it."""
    for key in folder:
        match = _MOMENT.fullmatch(key)
        if match and match[2] == "step" and not folder.meta(key).shape:
            return int(folder.read(key))
    return None


def _prefix(folder: DcpFolder, expected: set[str]) -> str:
    """Return what stands before the names of weights: whatever leads to the first that is known."""
    for key in folder:
        if _MOMENT.fullmatch(key):
            continue
        parts = key.split(".")
        for i in range(len(parts)):
            if ".".join(parts[i:]) in expected:
                return "".join(f"{part}." for part in parts[:i])
    raise ValueError(
        f"{folder.folder} has no tensor that its {CONFIG} asks for, such as {min(expected)}"
    )


def _metas(folder: DcpFolder, named: Mapping[str, str]) -> dict[str, TensorMeta]:
    return {name: folder.meta(key) for name, key in named.items()}


def _chosen(folder: DcpFolder, named: Mapping[str, str]) -> MappedSource:
    """Return some tensors of a folder under other names."""
    from mcore_parallel.layout import TensorLayout

    tensors = {
        name: Mapped(TensorLayout.whole(key, folder.meta(key).shape), folder.meta(key).dtype)
        for name, key in named.items()
    }
    return MappedSource(folder, Resolved(tensors=tensors, steps={}, dropped=(), repeats={}))


def _open_own_dcp(folder: DcpFolder, moments: bool) -> Weights:
    try:
        state = json.loads(folder.object(STATE))
        model, step = state["config"]["model"], int(state["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder.folder}: {STATE} is damaged: {error!r}") from None
    optimizer = state.get("optimizer") or {}
    weights = {key.removeprefix("model."): key for key in folder if key.startswith("model.")}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    for key in folder if moments else ():
        if match := _MOMENT.fullmatch(key):
            states[match[2]][match[1]] = key
    return Weights(
        source=_chosen(folder, weights),
        model=model,
        step=step,
        moments={kind: _chosen(folder, named) for kind, named in states.items()},
        optimizer_step=optimizer.get("step"),
    )

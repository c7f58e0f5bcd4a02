"""Weights of one kind of checkpoint into another, tensor by tensor, by one process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import Checkpoint
from mcore_ckpt.commit import Status, scan
from mcore_ckpt.hf.architecture import Architecture, architecture_for, find_architecture
from mcore_ckpt.hf.config import check_shapes, config_file, converted
from mcore_ckpt.hf.folder import CONFIG, GENERATION, HFFolder
from mcore_ckpt.hf.format import size_of
from mcore_ckpt.hf.sink import SafetensorsSink
from mcore_ckpt.hf.tokenizer import special_ids, tokenizer_files
from mcore_ckpt.hf.writer import DEFAULT_SHARD_BYTES, check_empty
from mcore_ckpt.sinks import CheckpointSink
from mcore_ckpt.sources import CheckpointWeights, MappedSource, TensorSink, TensorSource, metas
from mcore_ckpt.storage import LocalStorage
from mcore_parallel.mapping import TensorMeta

KINDS = ("hf", "native")
_TOKENIZER, _CONFIGS = "tokenizer/", "hf/"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion has written. `notes` are sentences about what was left out."""

    path: Path
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """A model under our names, wherever it is read from.

    model: as JSON, the way a checkpoint's state has it under `config.model`. files: beside the
    tensors: `tokenizer/…`, and `hf/config.json` and others as they came from Hugging Face.
    """

    source: TensorSource
    model: Mapping[str, Any]
    files: Mapping[str, bytes]
    step: int = 0


def convert(
    source: tuple[str, str | os.PathLike[str]],
    target: tuple[str, str | os.PathLike[str]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    known: Mapping[str, Architecture] | None = None,
) -> Converted:
    """Write the weights of `source` as `target`; each is a kind and a path.

    Kinds: `hf`, a Hugging Face folder; `native`, a checkpoint of ours (to read: or the directory of
    several, then the newest; to write: that directory). One tensor is in memory at a time.
    Tokenizer files and configs are carried along; optimizer state is not.

    dtype: of floating-point tensors; default: as they are, bit for bit.
    max_shard_bytes: size at which `hf` begins another file.
    known: architectures by name, looked at before those that installed packages register.

    Raises:
        FileNotFoundError: nothing of that kind is at the source.
        ValueError: the target is not empty; the architecture is unknown or cannot express the
            model; a field is not supported, or a tensor does not fit; names file and field.
        CheckpointError: the source is damaged; names the file.
    """
    for kind, _ in (source, target):
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    path = Path(target[1]).absolute()
    check_target(target[0], path)
    place = Path(source[1])
    weights = _open_hf(place, known) if source[0] == "hf" else _open_native(place)
    if target[0] == "native":
        return _to_native(weights, path, dtype)
    return _to_hf(weights, path, dtype, max_shard_bytes, known)


def check_target(kind: str, path: Path) -> None:
    """Raise ValueError when something is at `path`, but for what an interrupted save has left."""
    if kind == "native" and path.is_dir():
        left = {d.name for d in scan(LocalStorage(path)) if d.status is Status.UNCOMMITTED}
        if all(entry.name in left for entry in path.iterdir()):
            return
    check_empty(path)


def _open_hf(path: Path, known: Mapping[str, Architecture] | None) -> _Weights:
    folder = HFFolder.open(path, known=known)
    tensors = folder.tensors()
    source = MappedSource(tensors, folder.mapping.forward(metas(tensors)))
    source.check_repeats()
    files = {_TOKENIZER + name: data for name, data in folder.files().items()}
    files |= {_CONFIGS + name: data for name, data in folder.configs().items()}
    return _Weights(source=source, model=folder.architecture.to_tree(folder.model), files=files)


def _open_native(path: Path) -> _Weights:
    checkpoint = Checkpoint(path)
    try:
        model = checkpoint.state["config"]["model"]
    except (KeyError, TypeError):
        raise ValueError(f"{checkpoint.path} has no model architecture in its state") from None
    files = {
        name: checkpoint.file(name)
        for name in checkpoint.manifest.files
        if name.startswith((_TOKENIZER, _CONFIGS))
    }
    source = CheckpointWeights(checkpoint)
    return _Weights(source=source, model=model, files=files, step=checkpoint.step)


def _to_native(weights: _Weights, path: Path, dtype: torch.dtype | None) -> Converted:
    announced = {name: converted(m, dtype) for name, m in metas(weights.source).items()}
    sink = CheckpointSink(
        path,
        announced,
        step=weights.step,
        state={"config": {"model": dict(weights.model)}},
        files=weights.files,
    )
    with sink:
        _copy(weights.source, sink, announced)
    return _summary(sink.path, announced)


def _to_hf(
    weights: _Weights,
    path: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    known: Mapping[str, Architecture] | None,
) -> Converted:
    base = _base_config(weights)
    architecture = (
        architecture_for(weights.model, known)
        if base is None
        else find_architecture(base, CONFIG, known)
    )
    model = architecture.from_tree(weights.model)
    ours = metas(weights.source)
    check_shapes(ours, architecture.shapes(model))
    source = MappedSource(weights.source, architecture.mapping(model).inverse(ours))
    announced = {name: converted(meta, dtype) for name, meta in metas(source).items()}
    beside = _below(weights.files, _TOKENIZER)
    files = tokenizer_files(beside)
    if base is None:
        base = special_ids(files)
    if generation := weights.files.get(_CONFIGS + GENERATION):
        files[GENERATION] = generation
    files[CONFIG] = config_file(architecture, model, base, announced)
    with SafetensorsSink(path, announced, files=files, max_shard_bytes=max_shard_bytes) as sink:
        _copy(source, sink, announced)
    notes = ["its tokenizer is none that transformers reads, and was left out"]
    left_out = bool(beside) and not tokenizer_files(beside)
    return replace(_summary(path, announced), notes=tuple(notes if left_out else ()))


def _base_config(weights: _Weights) -> dict[str, Any] | None:
    data = weights.files.get(_CONFIGS + CONFIG)
    return None if data is None else dict(json.loads(data))


def _below(files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)
    }


def _copy(source: TensorSource, sink: TensorSink, announced: Mapping[str, TensorMeta]) -> None:
    for name, meta in announced.items():
        sink.write(name, source.read(name).to(meta.dtype))


def _summary(path: Path, announced: Mapping[str, TensorMeta]) -> Converted:
    size = sum(size_of(meta) for meta in announced.values())
    return Converted(path=path, num_tensors=len(announced), num_bytes=size)

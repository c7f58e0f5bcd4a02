"""Weights of one kind of checkpoint into another, tensor by tensor, by one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.addresses import Address, Place, absolute, local_path, place, storage_at
from mcore_ckpt.commit import Status, scan
from mcore_ckpt.hf.architecture import Architecture, architecture_for, find_architecture
from mcore_ckpt.hf.config import check_shapes, config_file, converted
from mcore_ckpt.hf.folder import CONFIG, GENERATION
from mcore_ckpt.hf.format import size_of
from mcore_ckpt.hf.sink import SafetensorsSink
from mcore_ckpt.hf.tokenizer import special_ids, tokenizer_files
from mcore_ckpt.hf.writer import DEFAULT_SHARD_BYTES, check_empty
from mcore_ckpt.opening import CONFIGS, STATE, TOKENIZER, Weights, detect, open_weights
from mcore_ckpt.sinks import CheckpointSink
from mcore_ckpt.sources import Joined, MappedSource, TensorSink, TensorSource, metas
from mcore_parallel.mapping import TensorMeta

KINDS = ("hf", "native", "dcp", "megatron", "auto")
"""What can be read. "auto" is whichever of the others is there."""
WRITTEN = ("hf", "native", "dcp")
"""What can be written."""
WEIGHTS = "model"
"""What the weights are called, where optimizer state has the name of its kind."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion has written. `notes` are sentences about what was left out."""

    path: Place
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...] = ()


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
    several, then the newest; to write: that directory), which alone may be an address, as for
    `save`; `dcp`, a folder of
    `torch.distributed.checkpoint`; to read alone: `megatron`, any of Megatron-LM's formats, and
    `auto`, whichever of these it is. One tensor is in memory at a time. Tokenizer files and configs
    are carried along. So is optimizer state from `dcp` and `megatron` to `native`, and from
    anything to `dcp`.

    dtype: of floating-point weights; default: as they are, bit for bit.
    max_shard_bytes: size at which `hf` and `dcp` begin another file.
    known: architectures by name, looked at before those that installed packages register.

    Raises:
        FileNotFoundError: nothing of that kind is at the source.
        ValueError: the target is not empty; the architecture is unknown or cannot express the
            model; a field is not supported, or a tensor does not fit; names file and field.
        CheckpointError: the source is damaged; names the file.
    """
    for kind, kinds in ((source[0], KINDS), (target[0], WRITTEN)):
        if kind not in kinds:
            raise ValueError(f"kind {kind!r} is none of {', '.join(kinds)}")
    there, at = absolute(target[1]), place(source[1])
    check_target(target[0], there)
    kind = detect(at) if source[0] == "auto" else source[0]
    moments = target[0] == "dcp" or (target[0] == "native" and kind in ("dcp", "megatron"))
    weights = open_weights(kind, at, known, moments=moments)
    if target[0] == "native":
        return _to_native(weights, there, dtype)
    path = local_path(there)
    if target[0] == "dcp":
        return _to_dcp(weights, path, dtype, max_shard_bytes)
    return _to_hf(weights, path, dtype, max_shard_bytes, known)


def check_target(kind: str, path: Place) -> None:
    """Raise ValueError when something is at `path`, but for what an interrupted save has left.

    And when it is an address, of another kind than `native`.
    """
    if kind != "native":
        check_empty(local_path(path))
        return
    storage = storage_at(path)
    left = {d.name for d in scan(storage) if d.status is Status.UNCOMMITTED}
    entries = storage.entries("")
    if entries.keys() <= left and (entries or isinstance(path, Address)):
        return
    if isinstance(path, Address):
        raise ValueError(f"{path} is not empty: give an address with nothing below it")
    check_empty(path)


def _to_native(weights: Weights, path: Place, dtype: torch.dtype | None) -> Converted:
    source = Joined({f"{kind}/{name}": at for kind, name, at in _tensors(weights)})
    announced = _announced(source, dtype, f"{WEIGHTS}/")
    sink = CheckpointSink(
        path,
        announced,
        step=weights.step,
        state=weights.state(),
        files=weights.files,
        prefix="",
    )
    with sink:
        _copy(source, sink, announced)
    return _summary(sink.path, announced)


def _to_dcp(
    weights: Weights, path: Path, dtype: torch.dtype | None, max_shard_bytes: int
) -> Converted:
    from mcore_ckpt.dcp.sink import DcpSink  # it loads torch.distributed.checkpoint

    paths: dict[str, tuple[tuple[str, ...], tuple[TensorSource, str]]] = {}
    for kind, name, at in _tensors(weights):
        keys = (kind, name) if kind == WEIGHTS else ("optimizer", "state", name, kind)
        paths[".".join(keys)] = keys, at
    source = Joined({key: at for key, (_, at) in paths.items()})
    announced = _announced(source, dtype, f"{WEIGHTS}.")
    state = json.dumps({**weights.state(), "step": weights.step})
    tensors = {paths[key][0]: meta for key, meta in announced.items()}
    with DcpSink(path, tensors, objects={(STATE,): state}, max_file_bytes=max_shard_bytes) as sink:
        _copy(source, sink, announced)
    return _summary(path, announced)


def _tensors(weights: Weights) -> Iterator[tuple[str, str, tuple[TensorSource, str]]]:
    """Yield kind and name of every tensor, and where it is."""
    for kind, source in {WEIGHTS: weights.source, **weights.moments}.items():
        for name in source:
            yield kind, name, (source, name)


def _announced(
    source: TensorSource, dtype: torch.dtype | None, prefix: str
) -> dict[str, TensorMeta]:
    """Return what will be written; only weights, whose names begin with `prefix`, are converted."""
    return {
        name: converted(meta, dtype if name.startswith(prefix) else None)
        for name, meta in metas(source).items()
    }


def _to_hf(
    weights: Weights,
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
    beside = _below(weights.files, TOKENIZER)
    files = tokenizer_files(beside)
    if base is None:
        base = special_ids(files)
    if generation := weights.files.get(CONFIGS + GENERATION):
        files[GENERATION] = generation
    files[CONFIG] = config_file(architecture, model, base, announced)
    with SafetensorsSink(path, announced, files=files, max_shard_bytes=max_shard_bytes) as sink:
        _copy(source, sink, announced)
    notes = ["its tokenizer is none that transformers reads, and was left out"]
    left_out = bool(beside) and not tokenizer_files(beside)
    return replace(_summary(path, announced), notes=tuple(notes if left_out else ()))


def _base_config(weights: Weights) -> dict[str, Any] | None:
    data = weights.files.get(CONFIGS + CONFIG)
    return None if data is None else dict(json.loads(data))


def _below(files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)
    }


def _copy(source: TensorSource, sink: TensorSink, announced: Mapping[str, TensorMeta]) -> None:
    for name, meta in announced.items():
        sink.write(name, source.read(name).to(meta.dtype))


def _summary(path: Place, announced: Mapping[str, TensorMeta]) -> Converted:
    size = sum(size_of(meta) for meta in announced.values())
    return Converted(path=path, num_tensors=len(announced), num_bytes=size)

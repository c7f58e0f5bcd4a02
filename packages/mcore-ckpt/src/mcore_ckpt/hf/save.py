"""From the tensors of a live model to a Hugging Face folder, whatever layout they are in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.addresses import local_path
from mcore_ckpt.agreement import together
from mcore_ckpt.exporting import Exporter, Held
from mcore_ckpt.hf.architecture import Architecture
from mcore_ckpt.hf.config import check_shapes, config_file, converted
from mcore_ckpt.hf.folder import CONFIG
from mcore_ckpt.hf.source import INDEX
from mcore_ckpt.hf.writer import (
    DEFAULT_SHARD_BYTES,
    Shard,
    ShardWriter,
    begin_folder,
    discard_folder,
    finish_folder,
    index_of,
    partial_folder,
    plan_shards,
)
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor
from mcore_parallel.mapping import TensorMeta


def save_hf(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, LayoutTensor],
    group: Group | None = None,
    *,
    architecture: Architecture,
    model: Any,
    prefix: str = "",
    base_config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write a live model as a Hugging Face folder and return its path when it is durable.

    Every rank of `group` (default: this process alone) calls it; elements cross ranks over the
    group's CPU twin. Each safetensors file is written by one rank, with one tensor in memory at a
    time. The folder is put together as `<folder>.partial`.

    tensors, prefix: this rank's local tensors, as for `load_hf`. Replicas are written once.
    architecture, model: what the model is, in the architecture's terms.
    base_config: a `config.json` whose fields are kept where the architecture does not decide them.
    files: other files, by name, such as the tokenizer's. Those of the group's rank 0 are taken.
    dtype: of floating-point tensors; default: as they are.

    Raises:
        ValueError: on every rank: something is at `folder`; the architecture cannot express the
            model; tensors are missing or of another shape; a dtype that safetensors does not have.
        CheckpointError: on every rank: writing failed on some rank; says where and why. Nothing is
            at `folder` then.
    """
    group = (group or Group.single()).cpu
    folder = local_path(folder).absolute()
    what = f"writing {folder} failed, nothing is there"
    held = Held.over(tensors, group, prefix, what)
    check_shapes(held.metas, architecture.shapes(model))
    exporter = Exporter(held, architecture.mapping(model), what)
    metas = {name: converted(target, dtype) for name, target in exporter.resolved.tensors.items()}
    shards = plan_shards(metas, max_shard_bytes)
    contents = dict(files or {})
    contents[CONFIG] = config_file(architecture, model, base_config, metas)
    index = index_of(shards)
    if index is not None:
        contents[INDEX] = index

    first = group.rank == 0

    def begin() -> None:
        if first:
            begin_folder(folder)

    together(group, what, begin)
    partial = partial_folder(folder)
    mine = shards[group.rank :: group.size]
    writer = ShardWriter(partial, mine)
    try:
        failure = _write(exporter, writer, shards, metas, group)

        def settle() -> None:
            if failure:
                raise failure
            writer.close()

        together(group, what, settle)
        together(group, what, lambda: finish_folder(partial, folder, contents) if first else None)
    finally:
        writer.abandon()
        if first:
            discard_folder(partial)  # not there any more when all went well
    return folder


def _write(
    exporter: Exporter,
    writer: ShardWriter,
    shards: Sequence[Shard],
    metas: Mapping[str, TensorMeta],
    group: Group,
) -> Exception | None:
    """Collect and write one tensor per rank at a time; return what went wrong on this rank.

    A rank that cannot write goes on collecting, since the others need what it holds.
    """
    failure: Exception | None = None
    names = [
        [name for shard in shards[rank :: group.size] for name in shard.tensors]
        for rank in range(group.size)
    ]
    for wanted in zip_longest(*names):
        value = exporter.collect(wanted)
        name = wanted[group.rank]
        if name is None or value is None or failure is not None:
            continue
        try:
            writer.write(name, value.to(metas[name].dtype))
        except Exception as error:  # reported to all ranks at the end
            failure = error
    return failure

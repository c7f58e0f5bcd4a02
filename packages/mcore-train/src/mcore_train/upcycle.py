"""A checkpoint with experts from one without."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from mcore_ckpt.addresses import Place, absolute, place
from mcore_ckpt.convert import check_target
from mcore_ckpt.opening import TOKENIZER, open_weights
from mcore_ckpt.sinks import CheckpointSink
from mcore_models import ModelConfig, MoEConfig
from mcore_models.upcycling import Upcycling, upcycled_config
from mcore_parallel import RngKey
from mcore_parallel.mapping import TensorMeta
from mcore_train.config import nearest
from mcore_train.load import from_tree


def upcycle(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    moe: Mapping[str, Any],
    *,
    layers: Collection[int] | None = None,
    seed: int = 1234,
) -> Place:
    """Write a dense model as one with experts that computes the same; return the checkpoint.

    One tensor is in memory at a time. Training begins with it by `checkpoint.load` with
    `weights_only`. The tokenizer is carried along.

    source: a checkpoint of ours, a Hugging Face folder, or what else `mcore-ckpt convert` reads.
    moe: fields of `MoEConfig`; `expert_ffn_size` is by default the MLP's width.
    layers: whose MLPs become experts, by default all. seed: of the routers.

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: the experts asked for would not compute the same; something is at `directory`.
        CheckpointError: the source is damaged, or the disk refuses.
    """
    check_target("native", absolute(directory))
    weights = open_weights("auto", place(source), None, moments=False)
    dense = from_tree(ModelConfig, dict(weights.model))
    for name in moe:
        known = [field.name for field in fields(MoEConfig)]
        if name not in known:
            raise ValueError(f"moe has no field {name!r}: did you mean {nearest(name, known)!r}?")
    wanted = from_tree(MoEConfig, {"expert_ffn_size": dense.mlp_size, **moe})
    plan = Upcycling(dense=dense, sparse=upcycled_config(dense, wanted, layers), key=RngKey(seed))
    announced = {
        name: TensorMeta(
            plan.shapes[name], torch.float32 if found is None else weights.source.meta(found).dtype
        )
        for name, found in plan.sources.items()
    }
    sink = CheckpointSink(
        directory,
        announced,
        step=weights.step,
        state={"config": {"model": asdict(plan.sparse)}},
        files={name: data for name, data in weights.files.items() if name.startswith(TOKENIZER)},
    )
    with sink:
        for name in announced:
            sink.write(name, plan.tensor(name, weights.source.read))
    return sink.path

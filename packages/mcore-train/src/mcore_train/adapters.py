"""Adapters on disk: PEFT's folders in and out, and runs whose adapters are merged."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch

import mcore_ckpt
from mcore_ckpt.addresses import Place, absolute, local_path
from mcore_ckpt.agreement import together
from mcore_ckpt.convert import check_target
from mcore_ckpt.finding import on_first_rank
from mcore_ckpt.hf.source import SafetensorsFolder, read_json
from mcore_ckpt.hf.writer import (
    Shard,
    ShardWriter,
    begin_folder,
    discard_folder,
    finish_folder,
    partial_folder,
)
from mcore_ckpt.importing import load_from
from mcore_models import GPT, build_model, import_builders
from mcore_models.adapters import (
    LoRAConfig,
    adapter_tensors,
    adapters,
    add_lora,
    lora_config,
    merge,
    peft_config,
    peft_mapping,
)
from mcore_parallel import Group, all_gather_object
from mcore_parallel.layout import LayoutTensor, gather_all
from mcore_parallel.mapping import TensorMeta
from mcore_train.config import TrainConfig
from mcore_train.load import from_tree

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def save_peft(folder: str | os.PathLike[str], model: GPT, *, base: str | None = None) -> Path:
    """Write the adapters of a live model as PEFT has them, and return the folder's path.

    Every rank of the model's mesh calls it; adapters are gathered on the first, which writes.

    base: where the model without them is to be found, by a path or a name.

    Raises:
        ValueError: on every rank: the model has no adapters, or some of a linear layer that Llama
            does not have; or something is at `folder`.
        CheckpointError: on every rank: the disk refuses.
    """
    folder, group = local_path(folder).absolute(), model.mesh.world
    whole = gather_all(adapter_tensors(model, prefix=""), group)
    mine = next((adapter.config for adapter in adapters(model).values()), None)
    configs = [config for config in all_gather_object(mine, group) if config is not None]

    def write() -> None:
        if not configs:
            raise ValueError("the model has no adapters")
        linears = [n.removesuffix(".lora_a.weight") for n in whole if n.endswith("lora_a.weight")]
        tree = peft_config(configs[0], linears, base)
        ours = {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in whole.items()}
        resolved = peft_mapping().inverse(ours)
        names = {theirs: resolved.sources(theirs)[0] for theirs in resolved.tensors}
        _write(folder, {theirs: whole[name] for theirs, name in names.items()}, tree)

    on_first_rank(group.cpu, f"writing {folder} failed", write)
    return folder


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    metas = {name: TensorMeta(tuple(x.shape), x.dtype) for name, x in tensors.items()}
    begin_folder(folder)
    partial = partial_folder(folder)
    writer = ShardWriter(partial, [Shard(file=TENSORS, tensors=metas)])
    try:
        for name, value in tensors.items():
            writer.write(name, value)
        writer.close()
        finish_folder(partial, folder, {CONFIG: (json.dumps(config, indent=2) + "\n").encode()})
    finally:
        writer.abandon()
        discard_folder(partial)


def load_peft(folder: str | os.PathLike[str], model: GPT) -> LoRAConfig:
    """Put the adapters of a folder of PEFT's onto a model, and return what they are.

    Every rank of the model's mesh calls it, and reads its own part of each tensor.

    Raises:
        FileNotFoundError: on every rank: there is no such folder.
        ValueError: on every rank: a kind of adapter that is not here, or one that does not fit the
            model; names file and field, or the tensor.
        CheckpointError: on every rank: a file is damaged.
    """
    group, place = model.mesh.world.cpu, Path(folder)

    def look() -> tuple[LoRAConfig, SafetensorsFolder]:
        if not (place / CONFIG).is_file():
            raise FileNotFoundError(f"{place} has no {CONFIG}: no folder of adapters")
        source = SafetensorsFolder(place, single=TENSORS)
        try:
            return lora_config(read_json(place / CONFIG), list(source)), source
        except ValueError as error:
            raise ValueError(f"{place / CONFIG}: {error}") from None

    found: list[tuple[LoRAConfig, SafetensorsFolder]] = []
    what = f"loading {place} failed"
    passing = (ValueError, FileNotFoundError)
    together(group, what, lambda: found.append(look()), passing=passing)
    config, source = found[0]
    add_lora(model, config)
    load_from(source, adapter_tensors(model, prefix=""), peft_mapping(), group)
    return config


def merge_run(run: str | os.PathLike[str], directory: str | os.PathLike[str]) -> Place:
    """Write the weights of a run with adapters as those of one without; return the checkpoint.

    One process holds the whole model. Tokenizer and other files are carried along.

    Raises:
        FileNotFoundError: there is no committed checkpoint at `run`.
        ValueError: the run has no adapters, or something is at `directory`.
        CheckpointError: the checkpoint is damaged, or the disk refuses.
    """
    model, checkpoint = open_run(run)
    check_target("native", absolute(directory))
    merge(model)
    return mcore_ckpt.save(
        directory,
        step=checkpoint.step,
        tensors=_weights(model),
        state={"config": {"model": asdict(model.config)}},
        files={name: checkpoint.file(name) for name in checkpoint.manifest.files},
    )


def open_run(run: str | os.PathLike[str]) -> tuple[GPT, mcore_ckpt.Checkpoint]:
    """Return the model of a run with adapters, on the CPU, with these; and its newest checkpoint.

    Errors as `merge_run`.
    """
    checkpoint = mcore_ckpt.open(run)
    tree = checkpoint.state.get("config", {})
    if tree.get("lora") is None:
        raise ValueError(f"{checkpoint.path} has no adapters: it was trained without lora")
    config = from_tree(TrainConfig, tree)
    assert config.lora is not None
    model = build_model(config.model, builders=import_builders(config.builders), key=None)
    add_lora(model, config.lora)
    mcore_ckpt.load(checkpoint.path, _weights(model), Group.single(), prefixes=["model/"])
    return model.eval(), checkpoint


def _weights(model: GPT) -> dict[str, LayoutTensor]:
    parameters = dict(model.named_parameters())
    return {
        name: LayoutTensor(parameters[name].detach(), spec.layout.renamed("model/".__add__))
        for name, spec in model.specs().items()
    }

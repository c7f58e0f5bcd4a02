"""A made-up Hugging Face architecture that needs every operator, for tests of conversion."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_parallel.layout import TensorLayout
from mcore_parallel.mapping import (
    Drop,
    Exact,
    Rename,
    Split,
    Stack,
    TensorMapping,
    TensorMeta,
    Transpose,
    evaluate,
)

Model = dict[str, Any]
VOCAB, HIDDEN, FFN, EXPERTS = 11, 4, 6, 4
SIZES = {"vocab": VOCAB, "hidden": HIDDEN, "layers": 2, "tied": False}
CONFIG = {"architectures": ["ToyForCausalLM"], **SIZES, "note": "kept"}


def flip(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Its own inverse, and no movement of boxes."""
    return [tensor.flip(0) for tensor in tensors]


class Toy:
    """What `mcore_ckpt.hf.Architecture` asks for; a model is a dict of sizes."""

    name = "ToyForCausalLM"

    def read_config(self, config: Mapping[str, Any]) -> Model:
        for name in SIZES:
            if name not in config:
                raise ValueError(f"{name} is missing")
        return {name: config[name] for name in SIZES}

    def write_config(self, model: Model, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if model["hidden"] % 2:
            raise ValueError(f"{self.name} cannot express hidden={model['hidden']}")
        return {**(base or {}), "architectures": [self.name], **model}

    def mapping(self, model: Model) -> TensorMapping:
        operators = [
            Rename("emb", "embedding.weight"),
            Split(
                "h.{layer}.qkv",
                tuple(f"layers.{{layer}}.attention.{part}.weight" for part in "qkv"),
                sizes=(2 * model["hidden"], model["hidden"], model["hidden"]),
            ),
            Transpose("h.{layer}.o"),
            Rename("h.{layer}.o", "layers.{layer}.attention.o.weight"),
            Stack("h.{layer}.experts.{expert}.up", "layers.{layer}.moe.experts.up.weight"),
            Exact(("h.{layer}.decay",), ("layers.{layer}.mamba.a_log",), flip, flip),
            Drop("h.{layer}.mask"),
        ]
        if model["tied"]:
            operators.insert(0, Drop("lm_head.weight", repeats="emb"))
        return TensorMapping(operators)

    def shapes(self, model: Model) -> dict[str, tuple[int, ...]]:
        hidden = model["hidden"]
        shapes = {"embedding.weight": (model["vocab"], hidden)}
        for i in range(model["layers"]):
            shapes |= {
                f"layers.{i}.attention.q.weight": (2 * hidden, hidden),
                f"layers.{i}.attention.k.weight": (hidden, hidden),
                f"layers.{i}.attention.v.weight": (hidden, hidden),
                f"layers.{i}.attention.o.weight": (hidden, 2 * hidden),
                f"layers.{i}.moe.experts.up.weight": (EXPERTS, FFN, hidden),
                f"layers.{i}.mamba.a_log": (hidden,),
            }
        return shapes if model["tied"] else {**shapes, "lm_head.weight": (model["vocab"], hidden)}

    def to_tree(self, model: Model) -> dict[str, Any]:
        return dict(model)

    def from_tree(self, tree: Mapping[str, Any]) -> Model:
        return dict(tree)


TOY = Toy()
KNOWN = {TOY.name: TOY}


def our_values(model: Model = SIZES) -> dict[str, torch.Tensor]:
    """Our tensors with any bits in them, NaNs included; the decay in fp32, the rest in bf16."""
    values = {}
    for i, (name, shape) in enumerate(TOY.shapes(model).items()):
        dtype = torch.float32 if "a_log" in name else torch.bfloat16
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.randint(256, (size,), generator=torch.Generator().manual_seed(i))
        values[name] = raw.to(torch.uint8).view(dtype).view(shape)
    return values


def metas(values: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(tuple(v.shape), v.dtype) for name, v in values.items()}


def their_values(model: Model = SIZES) -> dict[str, torch.Tensor]:
    ours = our_values(model)
    return evaluate(TOY.mapping(model).inverse(metas(ours)), ours)


def write_folder(
    folder: Path, values: Mapping[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    """A Hugging Face folder by the safetensors library, with a tokenizer's files in it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    model = {name: config.get(name, value) for name, value in SIZES.items()}
    save_file(dict(values or their_values(model)), folder / "model.safetensors")
    files = {
        "config.json": {**CONFIG, **config},
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer.json": {"added_tokens": [{"id": 2, "content": "</s>"}]},
        "tokenizer_config.json": {"eos_token": "</s>", "bos_token": None},
    }
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents))
    (folder / "README.md").write_text("no file of a tokenizer's")
    return folder


def layouts(rank: int, size: int, model: Model = SIZES) -> dict[str, TensorLayout]:
    """This rank's part: rows, columns or experts, the vocabulary padded, q, k and v fused."""
    made: dict[str, TensorLayout] = {}
    for name, shape in TOY.shapes(model).items():
        whole = TensorLayout.whole(name, shape)
        if "embedding" in name or "lm_head" in name:
            padded = TensorLayout.concat([whole, TensorLayout.padding((1, shape[1]))])
            made[name] = padded.slice(0, rank * 12 // size, (rank + 1) * 12 // size)
        elif "a_log" in name:
            made[name] = whole.replicated(rank, size)
        else:
            dim = 1 if ".o." in name else 0
            step = shape[dim] // size
            made[name] = whole.slice(dim, rank * step, (rank + 1) * step)
    for i in range(model["layers"]):
        parts = [made.pop(f"layers.{i}.attention.{part}.weight") for part in "qkv"]
        made[f"layers.{i}.attention.qkv.weight"] = TensorLayout.concat(parts)
    return made

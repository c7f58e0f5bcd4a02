"""What the ranks of the tests of Hugging Face models do; loads without transformers."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt import save
from mcore_ckpt.hf import HFFolder, SafetensorsFolder, load_hf, save_hf
from mcore_ckpt.importing import load_from
from mcore_models import GPT, ModelConfig, TokenBatch, build_model
from mcore_models.hf import ARCHITECTURES
from mcore_parallel import LayoutTensor, ParallelConfig, ParallelMesh, all_gather_object
from mcore_parallel.layout import Box
from mcore_parallel.mapping import TensorMeta
from mcore_parallel.tensor import VocabParallelEmbedding, VocabParallelHead, gather_logits


class CountingSource:
    """A folder that counts the bytes asked for, by tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = SafetensorsFolder(folder)
        self.read_bytes: dict[str, int] = defaultdict(int)

    def __iter__(self) -> Iterator[str]:
        return iter(self._folder)

    def meta(self, name: str) -> TensorMeta:
        return self._folder.meta(name)

    def where(self, name: str) -> str:
        return self._folder.where(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        value = self._folder.read(name, box)
        self.read_bytes[name] += value.nbytes
        return value


def tensors_of(model: GPT, prefix: str = "") -> dict[str, LayoutTensor]:
    specs = model.specs()
    return {
        name: LayoutTensor(p.data, specs[name].layout.renamed(lambda n: prefix + n))
        for name, p in model.named_parameters()
    }


def pad_vocabulary(model: GPT, rows: int) -> None:
    """Cut the vocabulary over the ranks in multiples of `rows`, as a user of the layers may."""
    config, group = model.config, model.mesh.tp
    options: dict[str, Any] = {"group": group, "multiple_of": rows}
    dtype = next(model.parameters()).dtype
    model.embedding = VocabParallelEmbedding(
        config.vocab_size, config.hidden_size, dtype=dtype, **options
    )
    model.lm_head = VocabParallelHead(
        config.hidden_size, config.vocab_size, tied=config.tied_embeddings, dtype=dtype, **options
    )


def build(config: ModelConfig, layout: ParallelConfig, dtype: torch.dtype, rows: int) -> GPT:
    mesh = ParallelMesh.create(layout)
    assert mesh is not None
    model = build_model(config, mesh, dtype=dtype, key=None)
    if rows:
        pad_vocabulary(model, rows)
    return model


def logits_of(model: GPT, tokens: Tensor) -> Tensor:
    """Of a model cut over tp alone, on every rank."""
    with torch.no_grad():
        local = model.stage_forward(TokenBatch.from_samples(tokens))
        whole = gather_logits(local, model.mesh.tp, vocab_size=model.config.vocab_size)
    return whole.view(*tokens.shape, -1)


def import_and_export(
    folder: Path,
    out: Path,
    tokens: Tensor,
    layout: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    rows: int = 0,
) -> dict[str, Any]:
    """Load, compute logits, export again; and what was read and how much there is."""
    opened = HFFolder.open(folder, known=ARCHITECTURES)
    model = build(opened.model, layout, dtype, rows)
    world = model.mesh.world
    source = CountingSource(folder)
    load_from(source, tensors_of(model), opened.mapping, world)
    # In fp32, whatever the folder is in: its values are converted, and nothing else differs.
    exact = build(opened.model, layout, torch.float32, rows)
    load_hf(folder, tensors_of(exact, "model/"), world, prefix="model/", known=ARCHITECTURES)
    for name, value in model.state_dict().items():
        assert torch.equal(exact.state_dict()[name], value.float())
    save_hf(
        out,
        tensors_of(model),
        world,
        architecture=opened.architecture,
        model=opened.model,
        base_config=opened.config,
        files=opened.files(),
    )
    save(
        out.with_name(out.name + "_native"),
        step=3,
        tensors=tensors_of(model, "model/"),
        state={"config": {"model": asdict(opened.model)}},
        group=world,
    )
    whole = model.mesh.pp.size == 1
    return {
        "logits": logits_of(exact, tokens) if whole else None,
        "read": dict(source.read_bytes),
        "held": sum(p.numel() * p.element_size() for p in model.parameters()),
        "rows": len(model.get_parameter("embedding.weight")) if whole else None,
    }


def logits_and_export(
    folder: Path, out: Path, tokens: Tensor, layout: ParallelConfig
) -> Tensor | None:
    """Load over any layout and export; the logits of tokens, of the last stage."""
    opened = HFFolder.open(folder, known=ARCHITECTURES)
    model = build(opened.model, layout, torch.float32, 0).eval()
    mesh = model.mesh
    load_hf(folder, tensors_of(model, "model/"), mesh.world, prefix="model/", known=ARCHITECTURES)
    if mesh.dp.size == 1:
        save_hf(
            out,
            tensors_of(model),
            mesh.world,
            architecture=opened.architecture,
            model=opened.model,
            base_config=opened.config,
            files=opened.files(),
        )
    batch, hidden = TokenBatch.from_samples(tokens), None
    with torch.no_grad():
        for stage in range(mesh.pp.size):
            output = model.stage_forward(batch, hidden) if stage == mesh.pp.rank else None
            passed = all_gather_object(output, mesh.pp)[stage]
            hidden = passed if stage + 1 == mesh.pp.rank else hidden
        if not model.is_last:
            return None
        assert passed is not None
        whole = gather_logits(passed, mesh.tp, vocab_size=model.config.vocab_size)
    return whole.view(*tokens.shape, -1)

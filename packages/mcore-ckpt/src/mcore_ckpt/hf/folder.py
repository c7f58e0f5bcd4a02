"""A Hugging Face model folder: `config.json`, safetensors files, tokenizer files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.hf.architecture import Architecture, find_architecture
from mcore_ckpt.hf.source import SafetensorsFolder, read_json
from mcore_ckpt.sources import metas
from mcore_parallel.mapping import Resolved, TensorMapping, TensorMeta

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True)
class HFFolder:
    """An opened folder.

    config: of `config.json`. model: what it describes, in the architecture's terms.
    """

    path: Path
    config: Mapping[str, Any]
    architecture: Architecture
    model: Any

    @staticmethod
    def open(
        path: str | os.PathLike[str], *, known: Mapping[str, Architecture] | None = None
    ) -> HFFolder:
        """Open a folder; no tensor is looked at.

        known: architectures by the name that `config.json` has for them, looked at before those
            that installed packages register.

        Raises:
            FileNotFoundError: there is no `config.json`.
            CheckpointError: `config.json` is no JSON object.
            ValueError: the architecture is unknown, or a field not supported; names file and field.
        """
        folder = Path(path)
        where = folder / CONFIG
        if not where.is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG}: no Hugging Face model folder")
        config = read_json(where)
        architecture = find_architecture(config, str(where), known)
        try:
            model = architecture.read_config(config)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return HFFolder(path=folder, config=config, architecture=architecture, model=model)

    @property
    def mapping(self) -> TensorMapping:
        """Between the folder's tensors and ours."""
        return self.architecture.mapping(self.model)

    def tensors(self) -> SafetensorsFolder:
        """Open the tensors, and compare names and shapes with what `config.json` asks for.

        Raises:
            FileNotFoundError, CheckpointError: as `SafetensorsFolder`.
            ValueError: a tensor is missing, nobody's, or of another shape; names file and tensor.
        """
        source = SafetensorsFolder(self.path)
        usual = self._resolve(source, self.mapping.inward())

        def where(name: str) -> str:
            return source.where(usual.sources(name)[0])

        known = set(usual.tensors)
        for name, meta in self._expected().items():
            if name not in known:
                raise ValueError(f"{self.path} has no tensor {name}, which its {CONFIG} asks for")
            found = usual.tensors[name]
            if found.shape != meta.shape:
                raise ValueError(
                    f"{where(name)}: {name} has shape {list(found.shape)}, {CONFIG} asks "
                    f"for {list(meta.shape)}"
                )
            known.remove(name)
        for name in sorted(known - set(self._resolve(source, self.mapping).dropped)):
            raise ValueError(
                f"{where(name)}: {name} is no tensor that {CONFIG} asks for "
                f"({self.architecture.name})"
            )
        return source

    def files(self) -> dict[str, bytes]:
        """Return the contents of the tokenizer's files, by name."""
        found = (self.path / name for name in TOKENIZER_FILES)
        return {path.name: path.read_bytes() for path in found if path.is_file()}

    def configs(self) -> dict[str, bytes]:
        """Return `config.json`, and `generation_config.json` if there is one, as they are."""
        found = (self.path / name for name in (CONFIG, GENERATION))
        return {path.name: path.read_bytes() for path in found if path.is_file()}

    def _expected(self) -> Mapping[str, TensorMeta]:
        # The dtype does not matter: only what a function of whole tensors makes of it is looked at.
        ours = {
            name: TensorMeta(shape, torch.float32)
            for name, shape in self.architecture.shapes(self.model).items()
        }
        resolved = self.mapping.inverse(ours)
        return {
            name: TensorMeta(mapped.shape, mapped.dtype)
            for name, mapped in resolved.tensors.items()
        }

    def _resolve(self, source: SafetensorsFolder, mapping: TensorMapping) -> Resolved:
        try:
            return mapping.forward(metas(source))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

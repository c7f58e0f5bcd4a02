"""A Hugging Face architecture as one value: how its configs are read and its tensors named."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_models.build import build_model
from mcore_models.config import ModelConfig
from mcore_models.hf.compare import TRAINING_ONLY, differences
from mcore_models.hf.rules import Rule
from mcore_parallel.mapping import Exact, Operator, TensorMapping

_NEVER_WRITTEN = frozenset({"dropout", "init_depth_scaled"})


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What `mcore-ckpt` and `LLM.from_hf` know of a Hugging Face architecture.

    Attributes:
        name: the class that `config.json` names under `architectures`.
        model_type: what it has under `model_type`.
        rules: between the fields of `config.json` and `ModelConfig`, in both directions.
        operators: of a model, the operators between its tensors there and ours.
        unwritten: fields of `config.json` that say in which form tensors are stored that are read
            and never written, such as `quantization_config`.
    """

    name: str
    model_type: str
    rules: tuple[Rule, ...]
    operators: Callable[[ModelConfig], Iterable[Operator]]
    unwritten: tuple[str, ...] = ()

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model that a `config.json` describes.

        Fields that no rule knows are taken to say nothing about the architecture.

        Raises:
            ValueError: a field is missing, or has a value that is not supported; names the field.
        """
        arguments: dict[str, Any] = {}
        for rule in self.rules:
            rule.read(config, arguments)
        return ModelConfig(**arguments)

    def write_config(
        self, model: ModelConfig, base: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the `config.json` of a model.

        base: fields to keep where the rules say nothing else, such as an earlier `config.json`.

        Raises:
            ValueError: the architecture cannot express the model; names the first field.
        """
        kept = {name: value for name, value in (base or {}).items() if name not in self.unwritten}
        config = {**kept, "architectures": [self.name], "model_type": self.model_type}
        if base is not None and self._says(config, model):
            return config  # as it was: fields that it leaves to their defaults stay out
        for rule in self.rules:
            rule.write(model, config)
        try:
            written = self.read_config(config)
        except ValueError as error:
            raise ValueError(f"{self.name} cannot express the model: {error}") from None
        for name, wanted, own in differences(model, written):
            if name not in TRAINING_ONLY:
                raise ValueError(
                    f"{self.name} cannot express {name}={wanted!r}, its own is {own!r}"
                )
        return config

    def _says(self, config: Mapping[str, Any], model: ModelConfig) -> bool:
        try:
            said = self.read_config(config)
        except ValueError:
            return False
        return all(name in _NEVER_WRITTEN for name, _, _ in differences(model, said))

    def mapping(self, model: ModelConfig) -> TensorMapping:
        """Return the mapping between the tensors of a model there and here.

        What routers remember of the last batch is nothing that theirs have: it begins with zeros.
        """
        operators = list(self.operators(model))
        if model.moe is not None and model.moe.keeps_load:
            router = "layers.{layer}.moe.router"
            weight, load = f"{router}.weight", f"{router}.load"
            operators.append(Exact((weight,), (weight, load), _with_load, _without_load))
        return TensorMapping(operators)

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every global tensor of a model, from the model itself."""
        specs = build_model(model, device="meta", key=None).specs()
        return {f.name: f.global_shape for spec in specs.values() for f in spec.layout.fragments}

    def to_tree(self, model: ModelConfig) -> dict[str, Any]:
        """Return a model as JSON values."""
        return asdict(model)

    def from_tree(self, tree: Mapping[str, Any]) -> ModelConfig:
        """Return the model that `to_tree` wrote down.

        Raises:
            ValueError: it is none.
        """
        try:
            return ModelConfig(**tree)
        except TypeError as error:
            raise ValueError(f"no model architecture: {error}") from None


def _with_load(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    (weight,) = tensors
    return weight, torch.zeros(len(weight), dtype=torch.float32, device=weight.device)


def _without_load(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors[:1]

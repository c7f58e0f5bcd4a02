"""A Hugging Face architecture as one value: how its configs are read and its tensors named."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

from mcore_models.build import build_model
from mcore_models.config import ModelConfig
from mcore_models.hf.rules import Rule, in_force
from mcore_parallel.mapping import Operator, TensorMapping

_NEVER_WRITTEN = {"dropout", "init_depth_scaled"}
_TRAINING_ONLY = {*_NEVER_WRITTEN, "init_std"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What `mcore-ckpt` and `LLM.from_hf` know of a Hugging Face architecture.

    Attributes:
        name: the class that `config.json` names under `architectures`.
        model_type: what it has under `model_type`.
        rules: between the fields of `config.json` and `ModelConfig`, in both directions.
        operators: of a model, the operators between its tensors there and ours.
    """

    name: str
    model_type: str
    rules: tuple[Rule, ...]
    operators: Callable[[ModelConfig], Iterable[Operator]]

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
        config = {**(base or {}), "architectures": [self.name], "model_type": self.model_type}
        if base is not None and self._says(config, model):
            return config  # as it was: fields that it leaves to their defaults stay out
        for rule in self.rules:
            rule.write(model, config)
        try:
            difference = _difference(model, self.read_config(config))
        except ValueError as error:
            raise ValueError(f"{self.name} cannot express the model: {error}") from None
        if difference is not None:
            raise ValueError(f"{self.name} cannot express {difference}")
        return config

    def _says(self, config: Mapping[str, Any], model: ModelConfig) -> bool:
        try:
            return _difference(model, self.read_config(config), but=_NEVER_WRITTEN) is None
        except ValueError:
            return False

    def mapping(self, model: ModelConfig) -> TensorMapping:
        """Return the mapping between the tensors of a model there and here."""
        return TensorMapping(self.operators(model))

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


def _difference(
    asked: ModelConfig, expressed: ModelConfig, but: Set[str] = _TRAINING_ONLY
) -> str | None:
    """Return what is first different between two models, None when they compute the same.

    but: fields that are left out of account.
    """
    for name in (field.name for field in fields(ModelConfig)):
        if name in but or name == "pattern":
            continue
        wanted, got = in_force(asked, name), in_force(expressed, name)
        if wanted != got:
            return f"{name}={wanted!r}, its own is {got!r}"
    layers = zip(asked.layer_pattern, expressed.layer_pattern, strict=True)
    for i, (wanted, got) in enumerate(layers):
        if wanted != got:
            return f"layer {i} of pattern {wanted!r}, its own is {got!r}"
    return None

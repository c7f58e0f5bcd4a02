"""Architectures with layers beyond the last that predict further tokens."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.parts import MTPConfig
from mcore_parallel.mapping import Concat, Drop, Operator, Rename, Split

_FURTHER = "num_nextn_predict_layers"

LayerOperators = Callable[[str, str], Iterator[Operator]]
"""Of what stands before the names of a layer's tensors, there and here, their operators."""


@dataclass(frozen=True, kw_only=True)
class FurtherArchitecture(Architecture):
    """An architecture with layers beyond the last that predict further tokens.

    Folders may have these layers or not, whatever their `config.json` says: those that transformers
    has written have none. They are left out when a folder is read, unless `further`; then they must
    be there, as in folders that have been published. A model that has them writes them.

    Attributes:
        other_types: what folders of this class may have under `model_type` besides.
    """

    further: bool = False
    other_types: tuple[str, ...] = ()

    def read_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model that a `config.json` describes, see `Architecture`."""
        model = super().read_config(config)
        depths = config.get(_FURTHER) or 0
        if not self.further or not depths:
            return model
        return replace(model, mtp=MTPConfig(num_depths=depths))

    def write_config(
        self, model: ModelConfig, base: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the `config.json` of a model, see `Architecture`."""
        if self.further:
            return replace(self, further=False).write_config(model, base)
        config = super().write_config(replace(model, mtp=None), base)
        if model.mtp is not None:
            config[_FURTHER] = model.mtp.num_depths
        given = None if base is None else base.get("model_type")
        if given in self.other_types:
            config["model_type"] = given
        return config


def further_repeats(model: ModelConfig) -> Iterator[Operator]:
    """Yield the operators, for the way in alone, for what repeats the model or is left out."""
    depths = len(model.mtp_pattern)
    if not depths:
        for parts in _PARTS:
            yield Drop(".".join([f"model.layers.{model.num_layers}", *parts]))
    for depth in range(depths):
        theirs = f"model.layers.{model.num_layers + depth}"
        # The model's own once more.
        yield Drop(f"{theirs}.embed_tokens.weight", repeats="model.embed_tokens.weight")
        head = "model.embed_tokens" if model.tied_embeddings else "lm_head"
        yield Drop(f"{theirs}.shared_head.head.weight", repeats=f"{head}.weight")


_PARTS = [["{a}", "{b}", "{c}", "{d}", "{e}"][:count] for count in range(1, 6)]
"""Whatever may follow the number of a layer."""


def further_operators(model: ModelConfig, layer: LayerOperators) -> Iterator[Operator]:
    """Yield the operators for layers that predict further tokens, with what is around them.

    They have to come before those for the layers of the model.
    """
    for depth in range(len(model.mtp_pattern)):
        theirs, ours = f"model.layers.{model.num_layers + depth}", f"mtp.{depth}"
        yield Rename(f"{theirs}.hnorm.weight", f"{ours}.hidden_norm.weight")
        yield Rename(f"{theirs}.enorm.weight", f"{ours}.embedding_norm.weight")
        yield Rename(f"{theirs}.shared_head.norm.weight", f"{ours}.final_norm.weight")
        # There the columns of the embedding come first.
        halves = f"{ours}.project.embedding", f"{ours}.project.hidden"
        yield Split(f"{theirs}.eh_proj.weight", halves, dim=1)
        yield Concat((halves[1], halves[0]), f"{ours}.project.weight", dim=1)
        yield from layer(theirs, f"{ours}.layers.0")

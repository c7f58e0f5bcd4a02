"""What architectures with mixtures of experts have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.rules import give, put
from mcore_parallel.mapping import Inward, Operator, Rename, Split, Stack, Unstack

_BLOCK = "model.layers.{layer}.mlp"
_NAMES = {part: f"{part}_proj" for part in ("gate", "up", "down")}


def joined_experts(block: str = _BLOCK, names: Mapping[str, str] = _NAMES) -> Inward:
    """Return what reads experts that are stored together, gate and up in one.

    So transformers 5 holds them, and saves them unless in the original format.
    """
    experts = f"{_BLOCK}.experts"
    apart = {part: f"{experts}.{part}_of_all" for part in ("gate", "up")}
    operators: list[Operator] = [
        Split(f"{experts}.gate_up_proj", tuple(apart.values()), dim=1),
        Rename(f"{experts}.down_proj", f"{experts}.down_of_all"),
    ]
    for part, theirs in names.items():
        one = f"{block}.experts.{{expert}}.{theirs}.weight"
        operators.append(Unstack(f"{experts}.{part}_of_all", one))
    if block != _BLOCK:
        operators.append(Rename(f"{_BLOCK}.gate.weight", f"{block}.gate.weight"))
    return Inward(tuple(operators))


def expert_operators(
    block: str = _BLOCK, names: Mapping[str, str] = _NAMES, ours: str = "layers.{layer}.moe"
) -> Iterator[Operator]:
    """Yield the operators for a router and for experts that are stored one by one.

    block: what stands before `gate.weight` and `experts.{expert}`. names: of the gate, up and down
        projections there. ours: what stands before `router` and `experts` here.
    """
    for part, theirs in names.items():
        stacked = f"{ours}.experts.{part}.weight"
        yield Stack(f"{block}.experts.{{expert}}.{theirs}.weight", stacked)
    yield Rename(f"{block}.gate.weight", f"{ours}.router.weight")


@dataclass(frozen=True)
class DenseLayers:
    """Which layers have an MLP in place of experts: `first_k_dense_replace` of the first ones."""

    theirs: str = "first_k_dense_replace"
    default: int = 0

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `pattern`, where there are any."""
        given = config.get(self.theirs)
        dense = self.default if given is None else given
        layers = fields["num_layers"]
        if type(dense) is not int or not 0 <= dense < layers:
            raise ValueError(
                f"{self.theirs}={dense!r} is not supported: 0 to {layers - 1} of {layers} layers"
            )
        set_pattern(fields, range(dense))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the number of layers before the first one with experts."""
        sparse = model.layers_with("E")
        put(config, self.theirs, sparse[0] if sparse else model.num_layers)


@dataclass(frozen=True)
class SharedExperts:
    """Experts that every token passes, as one MLP; there they have the width of the others."""

    theirs: str = "n_shared_experts"
    default: int = 1

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `moe.shared_ffn_size`."""
        number = config.get(self.theirs)
        number = self.default if number is None else number
        if type(number) is not int or number < 0:
            raise ValueError(f"{self.theirs}={number!r} must be a number of at least 0")
        give(fields, "moe.shared_ffn_size", number * fields["moe"]["expert_ffn_size"])

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set how many of the others' width they are; what is left of one shows when it is read."""
        if model.moe is not None:
            put(config, self.theirs, model.moe.shared_ffn_size // model.moe.expert_ffn_size)


def set_pattern(fields: dict[str, Any], dense: range | set[int]) -> None:
    """Give the layers of `dense` an MLP, the others experts."""
    if dense:
        layers = range(fields["num_layers"])
        fields["pattern"] = tuple("*-" if i in dense else "*E" for i in layers)

"""Bytes that a rank of a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.architecture import LayerShape, ModelShape
from mcore_parallel.cost.parts import ExpertsShape
from mcore_parallel.cost.work import Precision


@dataclass(frozen=True, kw_only=True)
class Held:
    """Parameters on one rank: `dense` are reduced over dp × cp, `routed` over edp."""

    dense: float = 0.0
    routed: float = 0.0

    def plus(self, other: Held, factor: float = 1.0) -> Held:
        """Return the sum with `factor` times `other`."""
        return Held(
            dense=self.dense + factor * other.dense, routed=self.routed + factor * other.routed
        )

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.routed


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank; working: of recomputation, gathers, head and loss."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    reserved: float

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(vars(self).values()))


def held_by_layer(layer: LayerShape, hidden: int, config: ParallelConfig) -> Held:
    """Return a rank's parameters of one layer."""
    dense, routed = float(layer.vectors), 0.0
    assert config.etp is not None
    for part in layer.parts:
        dense += part.vectors
        for product in part.products(hidden):
            dense += product.size / (1 if product.cut == "whole" else config.tp)
        if isinstance(part, ExpertsShape):
            each = part.routed(hidden) / config.etp + part.expert.vectors
            routed += part.num_experts / config.ep * each
    return Held(dense=dense, routed=routed)


def held_by_ends(shape: ModelShape, config: ParallelConfig, *, first: bool, last: bool) -> Held:
    """Return a rank's parameters of the embedding and the head, where its stage has them."""
    rows = shape.embedding / config.tp if first else 0.0
    if last and not (first and shape.tied_embeddings):
        rows += shape.head / config.tp
    return Held(dense=rows + (shape.vectors if last else 0))


def shards(config: ParallelConfig) -> tuple[int, int]:
    """Return over how many ranks states of dense and of routed parameters can be cut."""
    dense, routed = config.dense_view().size("dp") * config.cp, config.expert_view().size("edp")
    return dense // config.replicas, routed // config.replicas


def states(
    held: Held, ranks: tuple[int, int], precision: Precision, level: str
) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer at a sharding level over `ranks`."""
    cut, whole = held.dense / ranks[0] + held.routed / ranks[1], held.total
    return (
        precision.parameter * (cut if level == "parameters" else whole),
        precision.gradient * (cut if level in ("parameters", "gradients") else whole),
        precision.optimizer * (whole if level == "none" else cut),
    )

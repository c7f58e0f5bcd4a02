"""What the stages of a layout take and hold, put together from their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from mcore_parallel.config import ParallelConfig
from mcore_parallel.context.kinds import ContextKind, parse_kinds
from mcore_parallel.cost.architecture import LayerShape, ModelShape
from mcore_parallel.cost.layer import LayerCost, Passes
from mcore_parallel.cost.machines import Machine
from mcore_parallel.cost.memory import Held, Memory, held_by_ends, held_by_layer, shards, states
from mcore_parallel.cost.pipeline import live_chunks, live_heads
from mcore_parallel.cost.work import Precision

Mix: TypeAlias = tuple[int, ...]
"""How many layers of each kind."""


class Content(NamedTuple):
    """What a stage or a virtual stage consists of."""

    mix: Mix
    first: bool
    last: bool


class Division(NamedTuple):
    """A model divided over the stages of a layout, before anything is said of micro-batches.

    kinds: the different layers, and how their attention goes over the context axis; held: a rank's
    parameters of each. chunks, stages: content of each virtual stage and of each stage.
    """

    shape: ModelShape
    config: ParallelConfig
    kinds: list[tuple[LayerShape, ContextKind]]
    held: list[Held]
    chunks: list[Content]
    stages: list[Content]


def divide(shape: ModelShape, config: ParallelConfig) -> Division:
    """Return the stages of a resolved layout; ValueError where there are too few layers."""
    line, (kinds, members) = config.line, _kinds(shape, config)
    mixes = _mixes(config.place_layers(len(members)), members, len(kinds))
    chunks = [Content(mix, i == 0, i == line.last) for i, mix in enumerate(mixes)]
    stages = chunks
    if config.chunks > 1:
        stages = [
            _together([chunks[line.position(stage, c)] for c in range(config.chunks)])
            for stage in range(config.pp)
        ]
    held = [held_by_layer(layer, shape.hidden_size, config) for layer, _ in kinds]
    return Division(shape, config, kinds, held, chunks, stages)


def _together(contents: Sequence[Content]) -> Content:
    mix = tuple(map(sum, zip(*(content.mix for content in contents), strict=True)))
    return Content(mix, any(x.first for x in contents), any(x.last for x in contents))


class Stages:
    """What the stages of a division take and hold.

    cost: returns what a layer takes, given how its attention goes over the context axis; ends:
    what embedding and head take. Stages with the same content are put together once.
    """

    def __init__(
        self,
        division: Division,
        cost: Callable[[LayerShape, ContextKind], LayerCost],
        ends: tuple[LayerCost, LayerCost],
    ) -> None:
        self.shape, self.config, kinds, self.held, self.chunks, self.stages = division
        self.embedding, self.head = ends
        self.costs = [cost(layer, kind) for layer, kind in kinds]
        self._passes: dict[Content, Passes] = {}
        self._states: dict[Content, tuple[Held, float, float]] = {}

    def passes(self, content: Content) -> Passes:
        """Return what a stage, or one chunk of it, takes for one micro-batch."""
        if content not in self._passes:
            found = Passes()
            for cost, count in zip(self.costs, content.mix, strict=True):
                found = found.plus(cost.passes, count) if count else found
            found = found.plus(self.embedding.passes) if content.first else found
            found = found.plus(self.head.passes) if content.last else found
            self._passes[content] = found
        return self._passes[content]

    def parameters(self, stage: int) -> Held:
        """Return a rank's parameters of a stage."""
        return self._state(self.stages[stage])[0]

    def memory(
        self, micro_batches: int, machine: Machine, precision: Precision
    ) -> tuple[Memory, ...]:
        """Return what a rank of each stage holds at its fullest."""
        config, ranks = self.config, shards(self.config)
        gathered = 0.0
        if config.sharding == "parameters":  # the layer at work and the next are whole
            gathered = 2 * max(one.total for one in self.held) * precision.parameter
        memory = []
        for stage, content in enumerate(self.stages):
            held, kept, working = self._state(content)
            live = live_chunks(config, stage, micro_batches) / config.chunks
            if content.last:
                heads = live_heads(config, micro_batches)
                before, with_head = (heads - 1) * self.head.kept, heads * self.head.kept
                working = max(before + working, with_head + self.head.working)
            parameters, gradients, optimizer = states(held, ranks, precision, config.sharding)
            memory.append(
                Memory(
                    parameters=parameters,
                    gradients=gradients,
                    optimizer=optimizer,
                    activations=kept * live,
                    working=working + gathered,
                    reserved=machine.reserved,
                )
            )
        return tuple(memory)

    def _state(self, content: Content) -> tuple[Held, float, float]:
        """Parameters; bytes that a micro-batch keeps in layers, and that these use for a while."""
        if content not in self._states:
            self._states[content] = self._find_state(content)
        return self._states[content]

    def _find_state(self, content: Content) -> tuple[Held, float, float]:
        shape = self.shape
        held = held_by_ends(shape, self.config, first=content.first, last=content.last)
        kept = working = 0.0
        for one, cost, count in zip(self.held, self.costs, content.mix, strict=True):
            if count:
                held = held.plus(one, count)
                kept += count * cost.kept
                working = max(working, cost.working)
        if content.last:
            joined = Held(dense=2.0 * shape.hidden_size**2 / self.config.tp)
            last = held_by_layer(shape.layers[-1], shape.hidden_size, self.config)
            held = held.plus(last.plus(joined), shape.predictions)
        return held, kept, working


def _kinds(
    shape: ModelShape, config: ParallelConfig
) -> tuple[list[tuple[LayerShape, ContextKind]], list[int]]:
    """The different layers, and which of them each layer is."""
    contexts = parse_kinds(config.context_kind) if config.cp > 1 else (ContextKind("ring"),)
    if len(set(contexts)) == 1:
        return [(layer, contexts[0]) for layer, _ in shape.kinds], list(shape.members)
    numbers: dict[tuple[int, ContextKind], int] = {}
    members = []
    for i, member in enumerate(shape.members):
        key = member, contexts[i % len(contexts)]
        members.append(numbers.setdefault(key, len(numbers)))
    return [(shape.kinds[member][0], kind) for member, kind in numbers], members


def _mixes(placed: Sequence[range], members: Sequence[int], kinds: int) -> list[Mix]:
    if kinds == 1:
        return [(len(layers),) for layers in placed]
    mixes = []
    for layers in placed:
        held = members[layers.start : layers.stop]
        mixes.append(tuple(held.count(kind) for kind in range(kinds)))
    return mixes

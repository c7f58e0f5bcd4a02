"""What a training step of a model takes under a layout on a machine: seconds, bytes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mcore_parallel.config import ParallelConfig, check_sequence
from mcore_parallel.context.kinds import ContextKind, check_context_attention, parse_kinds
from mcore_parallel.cost.architecture import LayerShape, ModelShape
from mcore_parallel.cost.data import data_parallel_time, optimizer_time
from mcore_parallel.cost.layer import (
    LayerCost,
    Passes,
    Times,
    embedding_cost,
    head_cost,
    layer_cost,
)
from mcore_parallel.cost.machines import Machine
from mcore_parallel.cost.memory import Memory
from mcore_parallel.cost.parts import AttentionShape, MLPShape, Recurrent
from mcore_parallel.cost.pipeline import PipelineTime, pipeline_time
from mcore_parallel.cost.place import Place, place, reach
from mcore_parallel.cost.stage import Division, Stages, divide
from mcore_parallel.cost.work import Workload


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step under one layout.

    seconds: where they go, on the stage that computes longest: matrix "products", "attention",
    operations bound by memory ("streaming"), communication that nothing hides by axis ("tp" with
    sequence parallelism, "cp", "ep", "pp", "dp"), "bubble" (waiting for other stages) and
    "optimizer". Their sum is the step's time. memory: of the ranks of each pipeline stage.
    """

    config: ParallelConfig
    machine: Machine
    work: Workload
    world: int
    seconds: Mapping[str, float]
    memory: tuple[Memory, ...]
    flops_per_token: float

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.work.tokens / self.step / self.world

    @property
    def model_flops(self) -> float:
        """FLOP/s of one GPU, counting what the model needs once (`ModelShape.flops_per_token`)."""
        return self.flops_per_token * self.tokens_per_second

    @property
    def utilization(self) -> float:
        """Model FLOP/s over the bf16 peak, whatever the products' format."""
        return self.model_flops / self.machine.bf16.peak

    @property
    def fullest(self) -> int:
        """The stage whose ranks hold most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def peak_memory(self) -> float:
        """Bytes of the fullest rank."""
        return self.memory[self.fullest].total

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is enough."""
        return self.peak_memory <= self.machine.memory


def estimate(
    shape: ModelShape, config: ParallelConfig, machine: Machine, work: Workload, *, world: int
) -> Estimate:
    """Return what one step takes on `world` GPUs; ValueError says what of the layout cannot be."""
    return Planner(shape, machine, world).estimate(config, work)


class Draft(NamedTuple):
    """A layout that can be, before it is timed."""

    config: ParallelConfig
    work: Workload
    micro_batches: int
    here: Place
    stages: Stages
    memory: tuple[Memory, ...]

    @property
    def peak_memory(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.total for stage in self.memory)


@dataclass
class Planner:
    """Estimates of many layouts of one model on one machine, which share what they can."""

    shape: ModelShape
    machine: Machine
    world: int
    _last: tuple[ParallelConfig, Division] | None = field(default=None, repr=False)
    _layers: dict[object, LayerCost] = field(default_factory=dict, repr=False)
    _ends: dict[object, tuple[LayerCost, LayerCost]] = field(default_factory=dict, repr=False)

    def estimate(
        self, config: ParallelConfig, work: Workload, *, simulated: bool = True
    ) -> Estimate:
        """Return the estimate of one layout; see `pipeline_time` for `simulated`.

        Raises:
            ValueError: a layout that does not fit the world, the model or the batch, or a number
                format that the machine does not have.
        """
        return self.timed(self.draft(config, work), simulated=simulated)

    def draft(self, config: ParallelConfig, work: Workload) -> Draft:
        """Return the stages of a layout and their memory; the cheaper half of an estimate."""
        self.machine.rate(work.precision.format)
        division = self._divide(config)
        config = division.config
        check_sequence(config, work.seq_length)
        assert config.dp is not None
        count = work.micro_batches(config.dp)
        here = place(config, self.machine, work)
        stages = Stages(
            division,
            lambda layer, kind: self._layer(layer, here, work, kind),
            self._both_ends(config, here, work),
        )
        memory = stages.memory(count, self.machine, work.precision)
        return Draft(config, work, count, here, stages, memory)

    def timed(self, draft: Draft, *, simulated: bool = True) -> Estimate:
        """Return the estimate of a draft."""
        config, work, count, here, stages, memory = draft
        timing = pipeline_time(
            config,
            [stages.passes(chunk).halves for chunk in stages.chunks],
            count,
            self._message(config, here, work),
            simulated=simulated,
        )
        held = stages.parameters(timing.busiest)
        taken = stages.passes(stages.stages[timing.busiest])
        seconds = _seconds(taken.total, count, timing)
        seconds["dp"] = data_parallel_time(config, self.machine, work, held, taken, count=count)
        seconds["optimizer"] = optimizer_time(config, self.machine, work, held)
        return Estimate(
            config=config,
            machine=self.machine,
            work=work,
            world=self.world,
            seconds=seconds,
            memory=memory,
            flops_per_token=self.shape.flops_per_token(work.seq_length),
        )

    def _divide(self, config: ParallelConfig) -> Division:
        """The stages of a layout; of one after another equal layouts they are found once."""
        if self._last is None or self._last[0] != config:
            resolved = config.resolve(self.world)
            check_fit(self.shape, resolved)
            self._last = config, divide(self.shape, resolved)
        return self._last[1]

    def _layer(
        self, layer: LayerShape, here: Place, work: Workload, kind: ContextKind
    ) -> LayerCost:
        """What one layer takes, found once for all layouts that cut it in the same way."""
        key = (layer, here, kind, work.recompute, work.precision, work.runtime)
        if key not in self._layers:
            self._layers[key] = layer_cost(layer, self.shape.hidden_size, here, work, kind)
        return self._layers[key]

    def _both_ends(
        self, config: ParallelConfig, here: Place, work: Workload
    ) -> tuple[LayerCost, LayerCost]:
        """What embedding and head take, further predictions included."""
        shape = self.shape
        # A table that the embedding shares gets its gradients through autograd.
        own_buffer = config.sharding in ("none", "optimizer") and not shape.tied_embeddings
        key = (here, work.recompute, work.precision, work.runtime, own_buffer)
        if key not in self._ends:
            sizes = shape.vocab_size, shape.hidden_size
            found = head_cost(*sizes, here, work, own_buffer=own_buffer)
            # The factor of a further loss is known only later: its gradients wait.
            again = head_cost(*sizes, here, work, own_buffer=False)
            for _ in range(shape.predictions):
                found = self._further(found, again, here, work)
            self._ends[key] = embedding_cost(shape.hidden_size, here, work), found
        return self._ends[key]

    def _further(self, found: LayerCost, head: LayerCost, here: Place, work: Workload) -> LayerCost:
        """One prediction more: a layer, the product before it, and the head again."""
        hidden, format = self.shape.hidden_size, work.precision.format
        layer = self._layer(self.shape.layers[-1], here, work, ContextKind("ring"))
        joined = here.machine.product(here.tokens, 2 * hidden, hidden / here.tp, format)
        once = Times(products=joined)
        passes = found.passes.plus(layer.passes).plus(head.passes)
        return LayerCost(
            passes.plus(Passes(once, once, once)),
            found.kept + layer.kept + head.kept,
            max(found.working, layer.working, head.working),
        )

    def _message(self, config: ParallelConfig, here: Place, work: Workload) -> float:
        """Seconds of a message between two stages."""
        if config.pp == 1:
            return 0.0
        link = reach(self.machine, config.dense_view(), ["pp"])
        size = here.share * self.shape.hidden_size * 2.0
        if work.runtime.scattered_messages and not here.sequence_parallel:
            return link.send(size / config.tp) + here.tp_link.all_gather(size)
        return link.send(size)


def _seconds(taken: Times, count: int, timing: PipelineTime) -> dict[str, float]:
    seconds = {name: count * value for name, value in taken._asdict().items()}
    # The formulas of uneven stages may fall short of the busiest one by a rounding.
    return {**seconds, "bubble": max(0.0, timing.bubble), "pp": max(0.0, timing.transfers)}


def check_fit(shape: ModelShape, config: ParallelConfig) -> None:
    """Check that heads, widths and experts can be cut as the layout says; ValueError."""
    etp, experts = config.etp or config.tp, False
    for part in (part for layer, _ in shape.kinds for part in layer.parts):
        if isinstance(part, AttentionShape | Recurrent):
            _check_cut("heads", part.num_heads, "tp", config.tp)
            if isinstance(part, AttentionShape) and config.cp > 1:
                for kind in set(parse_kinds(config.context_kind)):
                    check_context_attention(
                        kind,
                        config.cp,
                        num_heads=part.num_heads // config.tp,
                        num_kv_heads=max(1, part.kv_heads // config.tp),
                    )
        elif isinstance(part, MLPShape):
            _check_cut("channels of a feed-forward", part.width, "tp", config.tp)
        else:
            experts = True
            _check_cut("experts", part.num_experts, "ep", config.ep)
            _check_cut("channels of an expert", part.expert.width, "etp", etp)
    if config.ep > 1 and not experts:
        raise ValueError(f"ep={config.ep} divides experts, and the model has none: use ep=1")


def _check_cut(what: str, count: int, axis: str, ways: int) -> None:
    if count % ways:
        below = next(n for n in range(min(ways, count), 0, -1) if count % n == 0)
        above = next((n for n in range(ways, count + 1) if count % n == 0), None)
        near = f"{below}" if above is None else f"{below} or {above}"
        raise ValueError(f"{count} {what} cannot be cut over {axis}={ways}: use {axis}={near}")

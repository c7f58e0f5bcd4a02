"""`ParallelConfig`: how many ranks each axis has, and what is checked before anything is built."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from mcore_parallel._layout_text import FIELDS, SIZES, parse_item
from mcore_parallel.axes import DENSE_AXES, EXPERT_AXES, AxisView
from mcore_parallel.context.kinds import ContextKind, parse_kinds
from mcore_parallel.expert.backends import check_dispatcher, check_lanes, check_overlap
from mcore_parallel.pipeline.actions import Line
from mcore_parallel.pipeline.schedules import check_kind
from mcore_parallel.stages import stage_layers

_ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
Sharding: TypeAlias = Literal["none", "optimizer", "gradients", "parameters"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")
"""What data-parallel ranks hold one share of, each level with all before it: zero=0 to zero=3."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism; every check raises ValueError with the numbers.

    tp, cp, pp, dp: sizes of the tensor, context, pipeline and data axis; dp None takes what the
    world leaves. ep, etp: expert view; etp None equals tp; the expert data axis takes the rest.
    dispatcher: how tokens reach their experts: "all-to-all", "all-gather", or one that a package
    registers (entry points `mcore_parallel.dispatchers`). lanes: parts of whole documents in which
    the layers take a micro-batch: tokens of one travel while another is computed.
    overlap_expert_exchange: forwards take turns with backwards of other micro-batches, and tokens
    of one travel while another is computed (of the schedules 1f1b and interleaved).
    sequence_parallel: activations between tensor-parallel regions are cut along the sequence.
    context_kind: how attention goes over the context axis, as `context.parse_kinds` reads it: a
    kind for all layers, or several that the layers of the model use in turn.
    order: axes from the fastest varying (neighbouring ranks) to the slowest, for both views (ep has
    no place in the dense one, nor cp in the expert one); axes left out come last, in the order
    tp cp ep dp pp, and must have size 1.
    schedule: of the pipeline, a name in `pipeline.SCHEDULES`. chunks: virtual stages that each
    stage holds, for the schedules interleaved (2 or more) and zb-v (2). microbatch_group: of
    interleaved, micro-batches that pass a chunk together; None is pp.
    stage_layers: layers of each pipeline stage, or with chunks of each virtual stage, in the order
    in which a micro-batch passes them; None spreads them evenly, first stages larger.
    first_stage_layers, last_stage_layers: layers of the first and the last stage, all its chunks
    together; the others share the rest. count_embedding, count_loss: when spreading evenly count
    the embedding and the loss as a layer each.
    sharding: what the ranks of dp × cp (expert parameters: edp) hold one share of instead of all:
    "none", the state of the "optimizer", that and "gradients", or these and "parameters".
    replicas: hybrid sharding; dp is replicas × the rest, shares are dealt out over the rest (× cp;
    edp likewise), and that many ranks hold each share.
    bucket_size: elements of a gradient bucket. overlap: reduce a bucket during the backward pass,
    when its last gradient has arrived; let tokens travel to experts while others are computed.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int | None = None
    ep: int = 1
    etp: int | None = None
    dispatcher: str = "all-to-all"
    lanes: int = 1
    overlap_expert_exchange: bool = False
    sequence_parallel: bool = False
    context_kind: str = "ring"
    order: str = "tp-cp-ep-dp-pp"
    schedule: str = "1f1b"
    chunks: int = 1
    microbatch_group: int | None = None
    stage_layers: tuple[int, ...] | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    sharding: Sharding = "optimizer"
    replicas: int = 1
    bucket_size: int = 40_000_000
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (*SIZES, "chunks", "microbatch_group", "replicas", "lanes", "bucket_size"):
            value = getattr(self, name)
            if value is None and name in ("dp", "etp", "microbatch_group"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name in ("dispatcher", "context_kind", "order", "schedule", "sharding"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a name, not {value!r}")
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of layers of at least 0, not {value!r}")
        axes = self._order_axes()
        for axis in _ORDER_AXES:
            if axis not in axes and (getattr(self, axis) or 1) != 1:
                raise ValueError(
                    f"order {self.order!r} leaves out {axis}, which has size {getattr(self, axis)}"
                )
        for kind in parse_kinds(self.context_kind):
            if self.cp > 1:
                kind.exchanging(self.cp)
        self._check_pipeline()
        self._check_sharding()
        check_dispatcher(self.dispatcher)
        check_lanes(self.lanes, self.sequence_parallel and self.tp > 1, self.sharding)
        if self.overlap_expert_exchange:
            check_overlap(
                ep=self.ep, lanes=self.lanes, overlap=self.overlap, sharding=self.sharding
            )

    def _check_sharding(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding {self.sharding!r} is none of {', '.join(SHARDINGS)}")
        if self.replicas > 1 and self.sharding == "none":
            raise ValueError(
                f"replicas = {self.replicas} with sharding none: every rank is a replica already; "
                f"use replicas = 1, or sharding optimizer"
            )
        plain = self.chunks == 1 and self.schedule in ("gpipe", "1f1b")
        if self.pp > 1 and not plain and self.sharding in ("gradients", "parameters"):
            raise ValueError(
                f"sharding {self.sharding} with schedule {self.schedule}: gradients are summed "
                f"after every backward, which here brings only some of a stage's; use sharding "
                f"optimizer, or schedule 1f1b or gpipe"
            )

    def _check_pipeline(self) -> None:
        group, chunks = self.microbatch_group, self.chunks
        paired = self.overlap_expert_exchange
        check_kind(self.schedule, chunks=chunks, group_size=group, paired=paired)
        if chunks > 1 and self.pp == 1:
            raise ValueError(f"chunks = {chunks} on pp = 1 stage: use pp ≥ 2, or chunks = 1")
        if group is not None and group < self.pp:
            raise ValueError(
                f"microbatch_group {group} is smaller than pp = {self.pp}: use {self.pp} or more"
            )
        counts = self.stage_layers
        if counts is not None and (len(counts) != self.pp * chunks or min(counts) < 0):
            of = f" of {chunks} chunks" if chunks > 1 else ""
            raise ValueError(
                f"stage_layers {list(counts)} must be {self.pp * chunks} counts of layers, one for "
                f"each of pp = {self.pp} stages{of}"
            )

    @property
    def line(self) -> Line:
        """The chunks of all stages in the order in which a micro-batch passes them."""
        return Line(num_stages=self.pp, num_chunks=self.chunks, zigzag=self.schedule == "zb-v")

    def place_layers(self, num_layers: int) -> list[range]:
        """Return the layers of each virtual stage, in the order of `line`; see `stage_layers`."""
        return stage_layers(
            num_layers,
            self.pp,
            self.stage_layers,
            chunks=self.chunks,
            zigzag=self.line.zigzag,
            first=self.first_stage_layers,
            last=self.last_stage_layers,
            count_embedding=self.count_embedding,
            count_loss=self.count_loss,
        )

    def context_kind_of(self, layer: int) -> ContextKind:
        """Return how layer `layer` of the whole model attends over the context axis."""
        kinds = parse_kinds(self.context_kind)
        return kinds[layer % len(kinds)]

    @property
    def context_parts(self) -> tuple[int, ...]:
        """Ranks of the parts into which two-level attention cuts the context axis, by size."""
        kinds = (kind for kind in parse_kinds(self.context_kind) if kind.name == "two-level")
        sizes = {kind.exchanging(self.cp) for kind in kinds} if self.cp > 1 else set()
        return tuple(sorted(sizes - {1, self.cp}))

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the dense model and its sequence: tp × cp × pp."""
        return self.tp * self.cp * self.pp

    def resolve(self, world_size: int) -> ParallelConfig:
        """Return the configuration for a world of `world_size` ranks, with dp and etp filled in.

        ValueError, with the nearest valid sizes, when the axes do not multiply to the world.
        """
        if world_size < 1:
            raise ValueError(f"world size must be at least 1, not {world_size}")
        size = self.model_size
        product = f"tp × cp × pp = {self.tp} × {self.cp} × {self.pp} = {size}"
        if self.dp is None and world_size % size:
            raise ValueError(
                f"world size {world_size} is not a multiple of {product}; nearest valid world "
                f"sizes: {_multiples(world_size, size)}"
            )
        dp = self.dp or world_size // size
        if dp * size != world_size:
            fitting = (
                "" if world_size % size else f" (or dp = {world_size // size} with this world)"
            )
            raise ValueError(
                f"world size {world_size} is not dp × tp × cp × pp = {dp} × {self.tp} × {self.cp} "
                f"× {self.pp} = {dp * size}; valid is world size {dp * size}{fitting}"
            )
        resolved = dataclasses.replace(self, dp=dp, etp=self.etp or self.tp)
        resolved._check_expert_view(world_size)
        resolved._check_replicas()
        return resolved

    def _check_expert_view(self, world_size: int) -> None:
        assert self.etp is not None
        stage = world_size // self.pp
        if stage % (self.etp * self.ep):
            free = [str(d) for d in range(1, stage + 1) if stage % (self.etp * d) == 0]
            valid = f"valid ep: {', '.join(free)}" if free else f"etp must divide {stage}"
            raise ValueError(
                f"etp × ep = {self.etp} × {self.ep} = {self.etp * self.ep} does not divide the "
                f"{stage} ranks of a pipeline stage (tp × cp × dp); {valid}"
            )
        dense, expert = self.dense_view(), self.expert_view()
        if self.pp > 1 and dense.stride("pp") != expert.stride("pp"):
            raise ValueError(
                f"order {self.order!r}: pipeline stages are {dense.stride('pp')} ranks apart for "
                f"dense parameters and {expert.stride('pp')} for experts; put pp last, as in "
                f"'tp-cp-ep-dp-pp'"
            )

    def _check_replicas(self) -> None:
        sizes = {"dp": self.dense_view().size("dp"), "edp": self.expert_view().size("edp")}
        for axis, size in sizes.items():
            if size % self.replicas:
                common = math.gcd(*sizes.values())
                valid = [str(n) for n in range(1, common + 1) if common % n == 0]
                raise ValueError(
                    f"replicas = {self.replicas} does not divide {axis} = {size}; valid replicas: "
                    f"{', '.join(valid)}"
                )

    @staticmethod
    def parse(text: str) -> ParallelConfig:
        """Return the configuration that a short text describes, such as "tp=2,pp=2,sp".

        Items are separated by commas or blanks. Sizes: tp cp pp dp ep etp. Switches, alone or with
        =0 or =1: sp (sequence parallel), overlap, count-embedding, count-loss. Sharding over dp:
        zero=0 (none), 1 (optimizer), 2 (and gradients), 3 (and parameters); replicas=2 (of each
        share). Attention over cp: cp-kind=two-level:4, cp-kind=all-gather*5+ring (in turn).
        Experts: dispatch=all-gather, lanes=2, overlap-experts (alone or with =0 or =1).
        Pipeline: schedule=interleaved, chunks=2, group=8 (micro-batches), first=3 and last=4
        (layers), stages=8+8+7+7 (layers of each virtual stage) or a layout string such as
        stages=Et*8|t*8|t*7|t*7L. Further: order=tp-cp-ep-dp-pp, bucket=40000000 (elements).
        ValueError names the item.
        """
        values: dict[str, object] = {}
        for item in text.replace(",", " ").split():
            key, equals, value = item.partition("=")
            field, parsed = parse_item(item, key, value if equals else None)
            if field == "sharding":
                parsed = SHARDINGS[cast(int, parsed)]
            if field in values:
                raise ValueError(f"layout {text!r} gives {key} twice")
            values[field] = parsed
        return ParallelConfig(**values)  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return a short text that `parse` reads back, such as "tp=2 pp=2 dp=1 sp"."""
        default = ParallelConfig()
        items = [f"tp={self.tp}"]
        items += [f"cp={self.cp}"] * (self.cp != 1)
        items += [f"pp={self.pp}"]
        items += [f"dp={self.dp}"] * (self.dp is not None)
        items += [f"ep={self.ep}"] * (self.ep != 1)
        items += [f"etp={self.etp}"] * (self.etp not in (None, self.tp))
        items += ["sp"] * self.sequence_parallel
        items += [f"cp-kind={self.context_kind}"] * (self.context_kind != default.context_kind)
        items += [f"dispatch={self.dispatcher}"] * (self.dispatcher != default.dispatcher)
        items += [f"lanes={self.lanes}"] * (self.lanes != 1)
        items += ["overlap-experts"] * self.overlap_expert_exchange
        level = SHARDINGS.index(self.sharding)
        items += [f"zero={level}"] * (self.sharding != default.sharding)
        items += [f"replicas={self.replicas}"] * (self.replicas != 1)
        items += ["overlap=0"] * (not self.overlap)
        items += [f"order={self.order}"] * (self.order != default.order)
        items += [f"schedule={self.schedule}"] * (self.schedule != default.schedule)
        items += [f"chunks={self.chunks}"] * (self.chunks != 1)
        for key in ("group", "first", "last"):
            value = getattr(self, FIELDS[key])
            items += [f"{key}={value}"] * (value is not None)
        items += ["count-embedding"] * self.count_embedding
        items += ["count-loss"] * self.count_loss
        if self.stage_layers is not None:
            items.append("stages=" + "+".join(map(str, self.stage_layers)))
        items += [f"bucket={self.bucket_size}"] * (self.bucket_size != default.bucket_size)
        return " ".join(items)

    def dense_view(self) -> AxisView:
        """Return the ranks as tp × cp × dp × pp, in the configured order (of a resolved config)."""
        assert self.dp is not None, "resolve() first"
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        axes = tuple(axis for axis in self._order_axes(complete=True) if axis in DENSE_AXES)
        return AxisView(axes=axes, sizes=tuple(sizes[axis] for axis in axes))

    def expert_view(self) -> AxisView:
        """Return the ranks as etp × ep × edp × pp, in the configured order (resolved config)."""
        assert self.dp is not None, "resolve() first"
        assert self.etp is not None, "resolve() first"
        edp = self.tp * self.cp * self.dp // (self.etp * self.ep)
        sizes = {"etp": self.etp, "ep": self.ep, "edp": edp, "pp": self.pp}
        renamed = {"tp": "etp", "dp": "edp"}
        order = (renamed.get(axis, axis) for axis in self._order_axes(complete=True))
        axes = tuple(axis for axis in order if axis in EXPERT_AXES)
        return AxisView(axes=axes, sizes=tuple(sizes[axis] for axis in axes))

    def _order_axes(self, *, complete: bool = False) -> tuple[str, ...]:
        axes = tuple(self.order.split("-"))
        if len(set(axes)) != len(axes) or not set(axes) <= set(_ORDER_AXES):
            raise ValueError(
                f"order {self.order!r} must name each of {', '.join(_ORDER_AXES)} at most once, "
                f"joined by '-', as in 'tp-cp-ep-dp-pp'"
            )
        if complete:
            axes += tuple(axis for axis in _ORDER_AXES if axis not in axes)
        return axes


def check_sequence(config: ParallelConfig, seq_length: int) -> None:
    """Require a sequence length that the ranks can share equally.

    Context parallelism cuts a sequence into 2 · cp chunks (each rank takes an early and a late
    one); sequence parallelism cuts what a rank holds into tp slices. ValueError with the nearest
    valid lengths.
    """
    unit, reasons = 1, []
    if config.cp > 1:
        unit = 2 * config.cp
        reasons.append(f"2 × cp = 2 × {config.cp} = {unit} chunks (context parallel)")
    if config.sequence_parallel and config.tp > 1:
        unit = math.lcm(unit, config.cp * config.tp)
        slices = "cp × tp" if config.cp > 1 else "tp"
        product = f"{config.cp} × {config.tp} = " if config.cp > 1 else ""
        reasons.append(f"{slices} = {product}{config.cp * config.tp} slices (sequence parallel)")
    if seq_length < 1 or seq_length % unit:
        raise ValueError(
            f"sequence length {seq_length} cannot be cut into {' and '.join(reasons) or 'tokens'}; "
            f"nearest valid lengths: {_multiples(seq_length, unit)}"
        )


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} and {below + unit}" if below > 0 else f"{unit}"

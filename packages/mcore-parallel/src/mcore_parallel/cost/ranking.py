"""Which layouts of a model on a machine are fastest, among all that a planner would try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.architecture import ModelShape
from mcore_parallel.cost.parts import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    MambaShape,
    MLPShape,
)
from mcore_parallel.cost.planner import Estimate, Planner
from mcore_parallel.cost.work import Workload

_MICRO_BATCHES = (1, 2, 4)
_SCHEDULES = ("1f1b", "interleaved")
_LONGEST_PIPELINE = 64
_LEAST_SLICE = 1024  # tokens of a sequence on one context parallel rank


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The fastest layouts first. tried: estimated ones; too_large: of them those that do not fit
    the memory however much is recomputed; refused: those that cannot be.
    """

    best: tuple[Estimate, ...]
    tried: int
    too_large: int
    refused: int


def rank(
    planner: Planner,
    work: Workload,
    *,
    keep: int = 10,
    schedules: Sequence[str] = _SCHEDULES,
    recompute: Sequence[str] | None = None,
) -> Ranking:
    """Return the fastest layouts that fit into memory.

    work: its micro_batch and recompute are chosen anew; a layout takes the first entry of
    `recompute` (default `ladder`) with which it fits. All are compared by formula, the `keep` best
    are then simulated. ValueError when no layout is left, with the memory of the smallest, or why
    the first cannot be.
    """
    planner.machine.rate(work.precision.format)
    found: list[Estimate] = []
    tried, least = 0, float("inf")
    refusals: list[ValueError] = []
    recompute = ladder(planner.shape) if recompute is None else recompute
    for config, micro_batch in layouts(planner, work.seq_length, schedules):
        try:
            for again in recompute:
                asked = replace(work, micro_batch=micro_batch, recompute=again)
                draft = planner.draft(config, asked)
                if draft.peak_memory <= planner.machine.memory:
                    found.append(planner.timed(draft, simulated=False))
                    break
                least = min(least, draft.peak_memory)
        except ValueError as refusal:
            refusals.append(refusal)
            continue
        tried += 1
    if not found:
        raise ValueError(_nothing(planner, tried, least, refusals))
    found.sort(key=lambda one: one.step)
    best = [planner.estimate(one.config, one.work) for one in found[:keep]]
    best.sort(key=lambda one: one.step)
    return Ranking(
        best=tuple(best), tried=tried, too_large=tried - len(found), refused=len(refusals)
    )


def ladder(shape: ModelShape) -> tuple[str, ...]:
    """Return recomputations of which each saves more memory and costs more time than the last."""
    parts = [part for layer, _ in shape.kinds for part in layer.parts]
    names = (
        *((MLPShape, "mlp"), (ExpertsShape, "moe")),
        *((MambaShape, "mamba"), (DeltaNetShape, "delta_net")),
    )
    whole = [name for kind, name in names if any(isinstance(part, kind) for part in parts)]
    return "none", "norm", "+".join(["norm", *whole]), "full"


def _nothing(planner: Planner, tried: int, least: float, refusals: list[ValueError]) -> str:
    where = f"{planner.world} GPUs of machine {planner.machine.name}"
    if not tried:
        return f"no layout of {where} can be; the first of {len(refusals)}: {refusals[0]}"
    return (
        f"no layout fits {where}: the smallest of {tried} needs {least / 2**30:.0f} GiB of "
        f"{planner.machine.memory / 2**30:.0f}; use more GPUs"
    )


def layouts(
    planner: Planner, seq_length: int, schedules: Sequence[str] = _SCHEDULES
) -> Iterator[tuple[ParallelConfig, int]]:
    """Yield layouts and micro-batches worth a try; sizes are powers of two, and tp within a node.

    tp goes with sequence parallelism; cp leaves each rank 1,024 tokens of a sequence or more;
    experts are cut over ep alone (etp = 1), which takes the ranks of dp, cp and tp. The optimizer
    is sharded; on one stage also all parameters.
    """
    shape, machine, world = planner.shape, planner.machine, planner.world
    most_cp = max(1, seq_length // _LEAST_SLICE)
    parts = [part for layer, _ in shape.kinds for part in layer.parts]
    attends = any(isinstance(part, AttentionShape) for part in parts)
    experts = max((x.num_experts for x in parts if isinstance(x, ExpertsShape)), default=0)
    for tp in _powers(min(machine.gpus_per_node, world)):
        for pp in _powers(min(_LONGEST_PIPELINE, world // tp, len(shape.layers))):
            for cp in _powers(min(most_cp, world // (tp * pp))) if attends else [1]:
                for ep in _powers(min(experts, world // pp)) if experts else [1]:
                    base = ParallelConfig(
                        tp=tp,
                        cp=cp,
                        pp=pp,
                        ep=ep,
                        etp=1 if experts else None,
                        sequence_parallel=tp > 1,
                    )
                    for config in _pipelines(base, len(shape.layers), schedules):
                        for micro_batch in _MICRO_BATCHES:
                            yield config, micro_batch


def _pipelines(
    base: ParallelConfig, layers: int, schedules: Sequence[str]
) -> Iterator[ParallelConfig]:
    """The schedules of a layout; embedding and loss count as layers where there are enough."""
    if base.pp == 1:
        yield base
        yield replace(base, sharding="parameters")
        return
    for schedule in schedules:
        for chunks in _chunks(schedule, base.pp, layers):
            ends = layers + 2 >= base.pp * chunks
            yield replace(
                base, schedule=schedule, chunks=chunks, count_embedding=ends, count_loss=ends
            )


def _chunks(schedule: str, pp: int, layers: int) -> list[int]:
    if schedule == "zb-v":
        return [2] if 2 * pp <= layers else []
    if schedule != "interleaved":
        return [1]
    return [chunks for chunks in _powers(16) if chunks > 1 and pp * chunks <= layers + 2]


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]

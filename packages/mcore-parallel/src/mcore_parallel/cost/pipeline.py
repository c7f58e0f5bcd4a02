"""How long a pipeline of given stages takes for a step, and what it keeps, simulated or by formula.

Letters as in `mcore_parallel.pipeline`: p stages, v chunks on each, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from mcore_parallel.config import ParallelConfig
from mcore_parallel.pipeline.actions import Action, Schedule
from mcore_parallel.pipeline.schedules import make_schedule
from mcore_parallel.pipeline.simulation import simulate

Halves: TypeAlias = tuple[float, float, float]
"""Seconds of a forward, a backward and a weight gradient."""

_SPLIT = ("zb-h1", "zb-v")  # schedules whose weight gradients are actions of their own


@dataclass(frozen=True, kw_only=True)
class PipelineTime:
    """seconds: of all micro-batches, to the end of the last backward. transfers: of these what is
    there for messages alone. busiest: the stage that computes longest, busy: its seconds.
    """

    seconds: float
    transfers: float
    busiest: int
    busy: float

    @property
    def bubble(self) -> float:
        """Seconds that the busiest stage waits, messages apart."""
        return self.seconds - self.transfers - self.busy


def pipeline_time(
    config: ParallelConfig,
    chunks: Sequence[Halves],
    micro_batches: int,
    transfer: float,
    *,
    simulated: bool = True,
) -> PipelineTime:
    """Return the time of a schedule.

    chunks: seconds of each virtual stage's forward, backward and weight gradient for one
    micro-batch, in the order of `config.line`.
    transfer: seconds of a message. simulated: run the schedule against the clock; otherwise use the
    formulas of its documentation, with the longest stage in place of all, which costs next to
    nothing and errs by a few percent of the bubble.
    """
    stages = _by_stage(config, chunks)
    totals = [sum(stage) for stage in stages]
    busiest = max(range(config.pp), key=totals.__getitem__)
    if config.pp == 1 or not simulated:
        alone, messages = _by_formula(config, stages, totals, micro_batches, transfer)
    else:
        alone = _simulated(config, chunks, micro_batches, 0.0)
        messages = _simulated(config, chunks, micro_batches, transfer) - alone if transfer else 0.0
    return PipelineTime(
        seconds=alone + messages,
        transfers=messages,
        busiest=busiest,
        busy=micro_batches * totals[busiest],
    )


def _by_stage(config: ParallelConfig, chunks: Sequence[Halves]) -> list[Halves]:
    line, stages = config.line, []
    for stage in range(config.pp):
        mine = [chunks[line.position(stage, chunk)] for chunk in range(config.chunks)]
        if len(mine) > 1:
            forward, backward, weight = (sum(half[i] for half in mine) for i in range(3))
            mine = [(forward, backward, weight)]
        stages.append(mine[0])
    return stages


def live_chunks(config: ParallelConfig, stage: int, micro_batches: int) -> int:
    """Return for how many chunks and micro-batches a stage keeps activations at most.

    Equal to `simulate(…).peak_activations`; nothing but the order of actions matters to it.
    """
    p, v, m = config.pp, config.chunks, micro_batches
    if config.schedule == "gpipe":
        return m
    if config.schedule == "zb-h1":
        return min(m, p)
    if config.schedule == "zb-v":
        return 2 * min(m, p)
    more = int(config.overlap_expert_exchange)
    if config.schedule == "interleaved" and v > 1:
        largest = _largest_group(m, config.microbatch_group or p, p)
        return min(v * m, 2 * (p - stage - 1) + (v - 1) * largest + 1 + more)
    return min(m, (p - stage) * (1 + more))


def live_heads(config: ParallelConfig, micro_batches: int) -> int:
    """Return for how many micro-batches there are gradients of the head at most.

    They are made in the forward pass of the last chunk, which its backward pass follows at once.
    """
    if config.schedule == "gpipe":
        return micro_batches
    return min(micro_batches, 1 + int(config.overlap_expert_exchange))


def _largest_group(count: int, size: int, least: int) -> int:
    full, rest = divmod(count, size)
    if not full:
        return count
    return size if rest >= least or not rest else size + -(-rest // full)


def _by_formula(
    config: ParallelConfig,
    stages: Sequence[Halves],
    totals: Sequence[float],
    micro_batches: int,
    transfer: float,
) -> tuple[float, float]:
    """Seconds without messages, and what messages add."""
    p, longest = config.pp, max(totals)
    work = micro_batches * longest
    if p == 1:
        return work, 0.0
    messages = 2 * (p - 1) * transfer
    if config.schedule in _SPLIT:
        forward, backward, weight = (sum(half[i] for half in stages) / p for i in range(3))
        if config.schedule == "zb-h1":
            return work + (p - 1) * (forward + max(0.0, backward - weight)), messages
        return work + (p - 1) * forward / 2, messages
    if config.chunks == 1 and config.schedule == "1f1b" and not config.overlap_expert_exchange:
        # a stage waits for the way to its neighbour and back in every round
        messages += 2 * transfer * max(0, micro_batches - p) * (p - 1) / p
    return work + (sum(totals) - longest) / config.chunks, messages


def _simulated(
    config: ParallelConfig, halves: Sequence[Halves], micro_batches: int, transfer: float
) -> float:
    """Simulate as many micro-batches as fill the pipeline; more of them repeat its steady state."""
    unit = config.microbatch_group or config.pp
    few = unit + micro_batches % unit
    if config.schedule == "zb-v" or config.overlap_expert_exchange:
        few += unit  # their steady state begins later
    if config.schedule == "gpipe" or micro_batches <= few + unit:
        return _makespan(config, micro_batches, halves, transfer)
    start = _makespan(config, few, halves, transfer)
    more = _makespan(config, few + unit, halves, transfer)
    return start + (micro_batches - few) / unit * (more - start)


def _makespan(
    config: ParallelConfig,
    micro_batches: int,
    halves: Sequence[Halves],
    transfer: float,
) -> float:
    line, split = config.line, config.schedule in _SPLIT

    def duration(action: Action) -> float:
        if action.is_receive:
            return 0.0
        if action.is_send:
            return transfer
        forward, backward, weight = halves[line.position(action.stage, action.chunk)]
        if action.kind == "F":
            return forward
        if action.kind == "W":
            return weight
        return backward if split else backward + weight

    asked = config.schedule, config.pp, micro_batches, config.chunks, config.microbatch_group
    return simulate(_schedule(*asked, paired=config.overlap_expert_exchange), duration).makespan


@lru_cache(maxsize=8)
def _schedule(
    kind: str, stages: int, micro_batches: int, chunks: int, group: int | None, *, paired: bool
) -> Schedule:
    """The same schedule serves with and without messages, and layouts that differ elsewhere."""
    return make_schedule(
        kind, stages, micro_batches, chunks=chunks, group_size=group, paired=paired
    )

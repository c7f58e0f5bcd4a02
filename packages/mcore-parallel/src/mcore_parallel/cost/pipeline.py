"""How long a pipeline of given stages takes for a step, and what it keeps, simulated or by formula.

Letters as in `mcore_parallel.pipeline`: p stages, v chunks on each, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.layer import Passes
from mcore_parallel.pipeline.actions import Action, Schedule
from mcore_parallel.pipeline.schedules import make_schedule
from mcore_parallel.pipeline.simulation import simulate

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
    chunks: Sequence[Passes],
    micro_batches: int,
    transfer: float,
    *,
    simulated: bool = True,
) -> PipelineTime:
    """Return the time of a schedule.

    chunks: what each virtual stage takes for one micro-batch, in the order of `config.line`.
    transfer: seconds of a message. simulated: run the schedule against the clock; otherwise use the
    formulas of its documentation, with the longest stage in place of all, which costs next to
    nothing and errs by a few percent of the bubble.
    """
    line = config.line
    totals = [
        sum(chunks[line.position(s, c)].total.total for c in range(line.num_chunks))
        for s in range(line.num_stages)
    ]
    busiest = max(range(line.num_stages), key=totals.__getitem__)
    busy = micro_batches * totals[busiest]
    run = _simulated if simulated and config.pp > 1 else _by_formula
    seconds = run(config, chunks, micro_batches, transfer)
    alone = seconds if not transfer else run(config, chunks, micro_batches, 0.0)
    return PipelineTime(seconds=seconds, transfers=seconds - alone, busiest=busiest, busy=busy)


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
    if config.schedule == "interleaved" and v > 1:
        largest = _largest_group(m, config.microbatch_group or p, p)
        return min(v * m, 2 * (p - stage - 1) + (v - 1) * largest + 1)
    return min(m, p - stage)


def _largest_group(count: int, size: int, least: int) -> int:
    full, rest = divmod(count, size)
    if not full:
        return count
    return size if rest >= least or not rest else size + -(-rest // full)


def _by_formula(
    config: ParallelConfig, chunks: Sequence[Passes], micro_batches: int, transfer: float
) -> float:
    line, p, v = config.line, config.pp, config.chunks
    stages = [Passes() for _ in range(p)]
    for position, passes in enumerate(chunks):
        stage, _ = line.place(position)
        stages[stage] = stages[stage].plus(passes)
    halves = [_halves(stage) for stage in stages]
    totals = [sum(stage) for stage in halves]
    longest = max(totals)
    if p == 1:
        return micro_batches * longest
    forward, backward, weight = (sum(half[i] for half in halves) / p for i in range(3))
    messages = 2 * (p - 1) * transfer
    work = micro_batches * longest
    if config.schedule == "zb-h1":
        return work + (p - 1) * (forward + max(0.0, backward - weight)) + messages
    if config.schedule == "zb-v":
        return work + (p - 1) * forward / 2 + messages
    fill = (sum(totals) - longest) / v
    if config.schedule == "1f1b" or v == 1:
        # a stage waits for the way to its neighbour and back in every round
        messages += 2 * transfer * max(0, micro_batches - p) * (p - 1) / p
    return work + fill + messages


def _halves(passes: Passes) -> tuple[float, float, float]:
    return passes.forward.total, passes.backward.total, passes.weight.total


def _simulated(
    config: ParallelConfig, chunks: Sequence[Passes], micro_batches: int, transfer: float
) -> float:
    """Simulate as many micro-batches as fill the pipeline; more of them repeat its steady state."""
    unit = config.microbatch_group or config.pp
    halves = [_halves(chunk) for chunk in chunks]
    few = unit + micro_batches % unit
    if config.schedule == "zb-v":
        few += unit  # its steady state begins later
    if config.schedule == "gpipe" or micro_batches <= few + unit:
        return _makespan(config, micro_batches, halves, transfer)
    start = _makespan(config, few, halves, transfer)
    more = _makespan(config, few + unit, halves, transfer)
    return start + (micro_batches - few) / unit * (more - start)


def _makespan(
    config: ParallelConfig,
    micro_batches: int,
    halves: Sequence[tuple[float, float, float]],
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
    return simulate(_schedule(*asked), duration).makespan


@lru_cache(maxsize=8)
def _schedule(
    kind: str, stages: int, micro_batches: int, chunks: int, group: int | None
) -> Schedule:
    """The same schedule serves with and without messages, and layouts that differ elsewhere."""
    return make_schedule(kind, stages, micro_batches, chunks=chunks, group_size=group)

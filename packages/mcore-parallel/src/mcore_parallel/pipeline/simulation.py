"""How long a schedule takes and what it holds in memory, computed without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcore_parallel.pipeline.actions import Action, Schedule, in_units


@dataclass(frozen=True, kw_only=True)
class OpTimes:
    """The duration of an action by its kind, the same on every stage and chunk; any unit.

    forward, backward, weight: of F, B and W (backward is the input-gradient half alone where the
    schedule has W actions). exchange: the part of a forward, and of a backward, in which tokens
    travel to experts and back. transfer: from a send until the other side has the message; the
    sender goes on meanwhile.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float = 0.0
    exchange: float = 0.0
    transfer: float = 0.0

    def __call__(self, action: Action) -> float:
        """Return the duration of `action`; a receive takes none of its own."""
        if action.is_receive:
            return 0.0
        if action.is_send:
            return self.transfer
        return {"F": self.forward, "B": self.backward, "W": self.weight}[action.kind]

    @property
    def hidden(self) -> float:
        """What a pair saves: each computes while tokens of the other travel."""
        return min(2 * self.exchange, self.forward, self.backward)


def chunk_times(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    exchange: float = 0.0,
    transfer: float = 0.0,
) -> OpTimes:
    """Return the durations of a schedule's actions from those of a whole stage.

    forward, backward (its input-gradient half), weight (its weight-gradient half): of all layers of
    a stage, of which each chunk has an equal part. Without W actions a B does both halves.
    exchange: how much longer forward and backward take because tokens travel to experts and back.
    Schedules of different kinds are compared under equal arguments.
    """
    chunks = schedule.line.num_chunks
    split = schedule.splits_backward
    return OpTimes(
        forward=(forward + exchange) / chunks,
        backward=((backward if split else backward + weight) + exchange) / chunks,
        weight=weight / chunks if split else 0.0,
        exchange=exchange / chunks,
        transfer=transfer,
    )


@dataclass(frozen=True, kw_only=True)
class Span:
    """One computing action and when it runs; of a pair `action` is the forward."""

    action: Action
    start: float
    end: float
    beside: Action | None = None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What `simulate` found.

    spans: the computing actions of every stage, in order, pairs as one. makespan: end of the last.
    peak_activations: for every stage the largest number of forwards, counted by chunk and
    micro-batch, whose backward (weight-gradient half included) was not done yet.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    peak_activations: tuple[int, ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """For every stage the time that it computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' time that they stand idle, 0 to 1."""
        total = self.makespan * len(self.spans)
        return 1.0 - sum(self.busy) / total if total else 0.0


def simulate(schedule: Schedule, duration: Callable[[Action], float] | None = None) -> Simulation:
    """Run a schedule that `check` accepts against the clock.

    Every stage does its actions one after another; a send costs the stage nothing and arrives
    `duration(send)` later; a receive waits for it. `duration`: any function of the action (stages
    and chunks may differ); None means `OpTimes()`, a backward twice as long as a forward. A pair
    takes as long as both of its actions, less what `OpTimes` has them hide of each other.
    ValueError when the schedule deadlocks.
    """
    duration, line = duration or OpTimes(), schedule.line
    hidden = duration.hidden if isinstance(duration, OpTimes) else 0.0
    units = [list(in_units(actions)) for actions in schedule]
    clock = [0.0] * len(schedule)
    at = [0] * len(schedule)
    arrival: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for stage, mine in enumerate(units):
            while at[stage] < len(mine):
                action, *beside = mine[at[stage]]
                if action.is_receive:
                    if action not in arrival:
                        break
                    clock[stage] = max(clock[stage], arrival[action])
                elif action.is_send:
                    arrival[line.partner(action)] = clock[stage] + duration(action)
                else:
                    start, took = clock[stage], duration(action)
                    other = beside[0] if beside else None
                    if other is not None:
                        took += duration(other) - hidden
                    clock[stage] = start + took
                    span = Span(action=action, start=start, end=start + took, beside=other)
                    spans[stage].append(span)
                at[stage] += 1
                moved = True
    stuck = [mine[i][0] for mine, i in zip(units, at, strict=True) if i < len(mine)]
    if stuck:
        waits = "; ".join(
            f"stage {a.stage} waits for stage {line.partner(a).stage} in {a}" for a in stuck
        )
        raise ValueError(f"the schedule deadlocks: {waits}")
    return Simulation(
        spans=tuple(map(tuple, spans)),
        makespan=max(clock, default=0.0),
        peak_activations=tuple(map(_peak_activations, schedule)),
    )


def _peak_activations(actions: Sequence[Action]) -> int:
    frees = "W" if any(action.kind == "W" for action in actions) else "B"
    live = peak = 0
    for action in actions:
        if action.kind == "F":
            live += 1
        elif action.kind == frees:
            live -= 1
        peak = max(peak, live)
    return peak

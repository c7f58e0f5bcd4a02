"""Proof that a schedule can run: `check` returns, or names stage, action and micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from mcore_parallel.pipeline.actions import Action, Kind, Line, Schedule
from mcore_parallel.pipeline.simulation import simulate

_BEFORE: tuple[tuple[Kind, Kind], ...] = (
    ("RECV_F", "F"),
    ("F", "SEND_F"),
    ("F", "B"),
    ("RECV_B", "B"),
    ("B", "SEND_B"),
    ("B", "W"),
)


def check(schedule: Schedule, *, num_microbatches: int | None = None) -> None:
    """Prove that every stage of the schedule can run its list to the end.

    Every chunk has one forward of every micro-batch, and one backward (and one weight-gradient
    half) if any action of the schedule is one; every dependency is met on its stage; each send has
    its receive, in the same order between any two stages; neighbouring chunks on one stage need no
    message but their order; a paired forward stands before the backward of another micro-batch;
    and with blocking receives and buffered sends nothing waits for ever. All ranks of a stage run
    one list, and a pair takes turns at places that layers alone decide, so that their collectives
    are in one order.
    `num_microbatches`: how many are expected; None takes it from the schedule. ValueError names the
    stage, the action and the micro-batch.
    """
    if not len(schedule):
        raise ValueError("the schedule has no stage")
    if schedule.line.num_stages != len(schedule):
        raise ValueError(
            f"the schedule has {len(schedule)} stages, its line {schedule.line.num_stages}"
        )
    _check_complete(schedule, num_microbatches)
    for actions in schedule:
        _check_local_order(actions, schedule.line)
        _check_pairs(actions)
    _check_pair_order(schedule)
    simulate(schedule)  # raises when a stage waits for ever


def _fault(action: Action, what: str) -> ValueError:
    return ValueError(f"stage {action.stage}, {action}: {what}")


def _check_complete(schedule: Schedule, num_microbatches: int | None) -> None:
    line = schedule.line
    every = [action for actions in schedule for action in actions]
    kinds: set[Kind] = {action.kind for action in every}
    count = num_microbatches or 1 + max((action.micro_batch for action in every), default=0)
    for stage, actions in enumerate(schedule):
        wanted = _wanted(stage, line, kinds, count)
        seen: set[Action] = set()
        for action in actions:
            if action.stage != stage:
                raise _fault(action, f"stands in the list of stage {stage}")
            if action in seen:
                raise _fault(action, "stands there twice")
            if action not in wanted:
                raise _fault(
                    action,
                    f"has no place in a schedule of {line.num_stages} stages, {line.num_chunks} "
                    f"chunks each, and {count} micro-batches",
                )
            seen.add(action)
        missing = wanted - seen
        if missing:
            raise _fault(min(missing, key=lambda a: (a.micro_batch, a.chunk, a.kind)), "is missing")


def _wanted(stage: int, line: Line, kinds: set[Kind], count: int) -> set[Action]:
    wanted: list[tuple[Kind, int]] = []
    for chunk in range(line.num_chunks):
        here = Action("F", stage, chunk, 0)
        before, after = line.neighbour(here, -1), line.neighbour(here, +1)
        from_other = before is not None and before[0] != stage
        to_other = after is not None and after[0] != stage
        chosen: list[Kind] = ["F"]
        chosen += ["RECV_F"] if from_other else []
        chosen += ["SEND_F"] if to_other else []
        if kinds & {"B", "W", "SEND_B", "RECV_B"}:
            chosen += ["B"]
            chosen += ["SEND_B"] if from_other else []
            chosen += ["RECV_B"] if to_other else []
        chosen += ["W"] if "W" in kinds else []
        wanted += [(kind, chunk) for kind in chosen]
    return {Action(kind, stage, chunk, i) for kind, chunk in wanted for i in range(count)}


def _check_local_order(actions: Sequence[Action], line: Line) -> None:
    place = {action: i for i, action in enumerate(actions)}
    for action, at in place.items():
        for needed in _needs(action, line):
            if place.get(needed, -1) > at:
                of = f" of chunk {needed.chunk}" if needed.chunk != action.chunk else ""
                raise _fault(action, f"comes before the {needed.kind}{of} that it needs")


def _check_pairs(actions: Sequence[Action]) -> None:
    for action, after in zip_longest(actions, actions[1:]):
        if not action.paired:
            continue
        if action.kind != "F" or after is None or after.kind != "B":
            raise _fault(action, f"only an F is paired, with a B right after it, not {after}")
        if after.micro_batch == action.micro_batch:
            raise _fault(action, f"is paired with the {after}, which may need it")


def _needs(action: Action, line: Line) -> Iterator[Action]:
    for first, then in _BEFORE:
        if action.kind == then:
            yield Action(first, action.stage, action.chunk, action.micro_batch)
    if action.kind in ("F", "B"):
        source = line.neighbour(action, -1 if action.kind == "F" else 1)
        if source is not None and source[0] == action.stage:
            yield Action(action.kind, action.stage, source[1], action.micro_batch)


def _check_pair_order(schedule: Schedule) -> None:
    line = schedule.line
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for stage, actions in enumerate(schedule):
        for action in actions:
            if action.is_send:
                other = line.partner(action)
                sent[stage, other.stage].append(other)
            elif action.is_receive:
                received[line.partner(action).stage, stage].append(action)
    for (source, target), expected in sorted(sent.items()):
        for want, have in zip_longest(expected, received[source, target]):
            if want != have:
                raise _fault(
                    have or want, f"stage {source} sends stage {target} the {want} at this point"
                )

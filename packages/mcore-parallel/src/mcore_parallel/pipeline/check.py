"""Proof that a schedule can run: `check` returns, or names stage, action and micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from mcore_parallel.pipeline.actions import Action, Kind, Schedule, num_chunks, partner
from mcore_parallel.pipeline.simulate import simulate

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
    its receive, in the same order between any two stages; and with blocking receives and buffered
    sends nothing waits for ever. `num_microbatches`: how many are expected; None takes it from the
    schedule. ValueError names the stage, the action and the micro-batch.
    """
    if not schedule:
        raise ValueError("the schedule has no stage")
    _check_complete(schedule, num_microbatches)
    for actions in schedule:
        _check_local_order(actions)
    _check_pair_order(schedule)
    simulate(schedule)  # raises when a stage waits for ever


def _fault(action: Action, what: str) -> ValueError:
    return ValueError(f"stage {action.stage}, {action}: {what}")


def _check_complete(schedule: Schedule, num_microbatches: int | None) -> None:
    every = [action for actions in schedule for action in actions]
    kinds: set[Kind] = {action.kind for action in every}
    chunks = num_chunks(every)
    count = num_microbatches or 1 + max((action.micro_batch for action in every), default=0)
    last = chunks * len(schedule) - 1
    expected = set()
    for stage in range(len(schedule)):
        for chunk in range(chunks):
            position = chunk * len(schedule) + stage
            wanted: list[Kind] = ["F"]
            wanted += ["RECV_F"] if position > 0 else []
            wanted += ["SEND_F"] if position < last else []
            if kinds & {"B", "W", "SEND_B", "RECV_B"}:
                wanted += ["B"]
                wanted += ["SEND_B"] if position > 0 else []
                wanted += ["RECV_B"] if position < last else []
            wanted += ["W"] if "W" in kinds else []
            expected |= {Action(k, stage, chunk, i) for k in wanted for i in range(count)}
    for stage, actions in enumerate(schedule):
        seen: set[Action] = set()
        for action in actions:
            if action.stage != stage:
                raise _fault(action, f"stands in the list of stage {stage}")
            if action in seen:
                raise _fault(action, "stands there twice")
            if action not in expected:
                raise _fault(
                    action,
                    f"has no place in a schedule of {len(schedule)} stages, {chunks} chunks each, "
                    f"and {count} micro-batches",
                )
            seen.add(action)
        missing = [a for a in expected if a.stage == stage and a not in seen]
        if missing:
            raise _fault(min(missing, key=lambda a: (a.micro_batch, a.chunk, a.kind)), "is missing")


def _check_local_order(actions: Sequence[Action]) -> None:
    place = {action: i for i, action in enumerate(actions)}
    for action, at in place.items():
        for first, then in _BEFORE:
            if action.kind == then:
                needed = Action(first, action.stage, action.chunk, action.micro_batch)
                if place.get(needed, -1) > at:
                    raise _fault(action, f"comes before the {first} that it needs")


def _check_pair_order(schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for stage, actions in enumerate(schedule):
        for action in actions:
            if action.is_send:
                other = partner(action, len(schedule))
                sent[stage, other.stage].append(other)
            elif action.is_receive:
                received[partner(action, len(schedule)).stage, stage].append(action)
    for (source, target), expected in sorted(sent.items()):
        for want, have in zip_longest(expected, received[source, target]):
            if want != have:
                raise _fault(
                    have or want, f"stage {source} sends stage {target} the {want} at this point"
                )

"""Pipeline schedules as pure functions: numbers in, the actions of every stage out.

Names: p stages, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mcore_parallel.pipeline.actions import Action


def gpipe(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the GPipe schedule: all forwards, then all backwards.

    The bubble is that of `one_f_one_b`, (p−1)/(m+p−1) for equal stages, but every stage keeps the
    activations of all m micro-batches. Source: Huang et al. 2019, arXiv:1811.06965.
    ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    return [
        [
            *(a for i in range(num_microbatches) for a in _forward(s, i, num_stages)),
            *(a for i in range(num_microbatches) for a in _backward(s, i, num_stages)),
        ]
        for s in range(num_stages)
    ]


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return the 1F1B schedule: after a warm-up every stage alternates forward and backward.

    Stage s runs p−s−1 forwards ahead and so keeps the activations of at most p−s micro-batches; the
    bubble is (p−1)/(m+p−1) for equal stages. Source: Narayanan et al. 2021, arXiv:2104.04473.
    ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    schedule = []
    for s in range(num_stages):
        ahead = min(num_stages - s - 1, num_microbatches)
        actions: list[Action] = []
        for i in range(ahead):
            actions += _forward(s, i, num_stages)
        for i in range(ahead, num_microbatches):
            actions += _forward(s, i, num_stages)
            actions += _backward(s, i - ahead, num_stages)
        for i in range(num_microbatches - ahead, num_microbatches):
            actions += _backward(s, i, num_stages)
        schedule.append(actions)
    return schedule


SCHEDULES: Mapping[str, Callable[[int, int], list[list[Action]]]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe}
)
"""The schedules by the names that configurations use."""


def _positive(num_stages: int, num_microbatches: int) -> None:
    for what, number in (("stages", num_stages), ("micro-batches", num_microbatches)):
        if number < 1:
            raise ValueError(f"a pipeline schedule needs at least 1 of {what}, not {number}")


def _forward(stage: int, i: int, num_stages: int) -> list[Action]:
    actions = [Action("F", stage, 0, i)]
    if stage > 0:
        actions.insert(0, Action("RECV_F", stage, 0, i))
    if stage < num_stages - 1:
        actions.append(Action("SEND_F", stage, 0, i))
    return actions


def _backward(stage: int, i: int, num_stages: int) -> list[Action]:
    actions = [Action("B", stage, 0, i)]
    if stage < num_stages - 1:
        actions.insert(0, Action("RECV_B", stage, 0, i))
    if stage > 0:
        actions.append(Action("SEND_B", stage, 0, i))
    return actions

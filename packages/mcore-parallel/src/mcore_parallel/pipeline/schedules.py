"""Pipeline schedules as pure functions: numbers in, the actions of every stage out.

Names: p stages, v chunks on each, m micro-batches; F, B, W the times of forward, input-gradient and
weight-gradient half of a whole stage. A bubble is the part of all stages' time that they are idle.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from mcore_parallel.pipeline.actions import Action, Kind, Line, Schedule, with_messages


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forwards, then all backwards.

    The bubble is that of `one_f_one_b`, (p−1)/(m+p−1) for equal stages, but every stage keeps the
    activations of all m micro-batches. Source: Huang et al. 2019, arXiv:1811.06965.
    ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    kinds: tuple[Kind, ...] = ("F", "B")
    every = range(num_microbatches)
    stages = [[Action(k, s, 0, i) for k in kinds for i in every] for s in range(num_stages)]
    return with_messages(stages, Line(num_stages=num_stages))


def one_f_one_b(num_stages: int, num_microbatches: int, *, paired: bool = False) -> Schedule:
    """Return the 1F1B schedule: after a warm-up every stage alternates forward and backward.

    Stage s runs p−s−1 forwards ahead and so keeps the activations of at most p−s micro-batches; the
    bubble is (p−1)/(m+p−1) for equal stages. Source: Narayanan et al. 2021, arXiv:2104.04473.

    With `paired` stage s runs 2(p−s−1) + 1 forwards ahead, and then every forward takes turns with
    the backward of another micro-batch: tokens of one travel to their experts while the other
    computes. It keeps the activations of up to 2(p−s) micro-batches; with m ≥ 2p the bubble is
    the same. Source: the overlap of DeepSeek-AI 2024, arXiv:2412.19437, in one direction, with one
    copy of the weights.
    ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    stages = []
    for s in range(num_stages):
        forwards = [Action("F", s, 0, i) for i in range(num_microbatches)]
        backwards = [Action("B", s, 0, i) for i in range(num_microbatches)]
        ahead = num_stages - s - 1
        stages.append(_alternate(forwards, backwards, 2 * ahead if paired else ahead, paired))
    return with_messages(stages, Line(num_stages=num_stages))


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    chunks: int,
    group_size: int | None = None,
    paired: bool = False,
) -> Schedule:
    """Return interleaved 1F1B: every stage holds v chunks and passes groups through one by one.

    A group of `group_size` micro-batches (default p, the least possible) runs through the first
    chunk of a stage before any of it runs through the second. Micro-batches that fill no group make
    a last one of their own if they are at least p; else they are spread over the groups, so that
    nobody waits for them. For equal stages the bubble is (p−1)/(v·m+p−1) for every m ≥ p; stage 0
    keeps at most 2(p−1) + (v−1)·g + 1 chunks' activations, where g is the largest group. More
    micro-batches in a group leave more time for messages, and cost memory. With `paired`, as in
    `one_f_one_b`, a stage runs one forward more ahead and keeps as much more.
    Source: Narayanan et al. 2021, arXiv:2104.04473. ValueError when a number is not positive or a
    group is smaller than p.
    """
    _positive(num_stages, num_microbatches, chunks=chunks)
    group_size = num_stages if group_size is None else group_size
    if group_size < num_stages:
        raise ValueError(
            f"a group of {group_size} micro-batches is smaller than the pipeline of {num_stages} "
            f"stages, which would wait for itself: use a group size of {num_stages} or more"
        )
    if chunks == 1:
        return one_f_one_b(num_stages, num_microbatches, paired=paired)
    groups = _groups(num_microbatches, group_size, num_stages)
    ahead = (chunks - 1) * max(len(group) for group in groups)
    stages = []
    for s in range(num_stages):
        forwards = [Action("F", s, c, i) for g in groups for c in range(chunks) for i in g]
        backwards = [Action("B", s, c, i) for g in groups for c in range(chunks)[::-1] for i in g]
        stages.append(_alternate(forwards, backwards, 2 * (num_stages - s - 1) + ahead, paired))
    return with_messages(stages, Line(num_stages=num_stages, num_chunks=chunks))


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B whose weight gradients are put off into the bubble.

    Stage s computes the weight gradient of a micro-batch s backwards later, so that the stage
    before gets its gradients sooner. For equal stages and m ≥ p the bubble takes
    (p−1)·(F + max(0, B−W)) instead of (p−1)·(F+B+W), with the peak memory of 1F1B: no stage keeps
    more than min(p, m) micro-batches. Source: Qi et al. 2023, arXiv:2401.10241.
    ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    stages = []
    for s in range(num_stages):
        forwards = [Action("F", s, 0, i) for i in range(num_microbatches)]
        backwards = [Action("B", s, 0, i) for i in range(num_microbatches)]
        mine: list[Action] = []
        for action in _alternate(forwards, backwards, num_stages - s - 1):
            mine.append(action)
            if action.kind == "B" and action.micro_batch >= s:
                mine.append(Action("W", s, 0, action.micro_batch - s))
        left = range(max(0, num_microbatches - s), num_microbatches)
        stages.append([*mine, *(Action("W", s, 0, i) for i in left)])
    return with_messages(stages, Line(num_stages=num_stages))


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Return ZB-V: two chunks on each stage, the line running down the stages and back up.

    The first stage holds both ends of the model, so it has the loss as soon as anybody, and the
    weight gradients fill what would be the bubble. For equal stages, F = B = W and m ≥ 2p−1 only
    the start remains, (p−1)·F/2; no stage keeps more than p micro-batches' activations (2p of its
    chunks'). Source: Qi et al. 2024, arXiv:2405.15362. ValueError when a number is not positive.
    """
    _positive(num_stages, num_microbatches)
    # Its phases need 2p−1 micro-batches. An order without those that do not exist is still one in
    # which nothing waits for ever.
    count = max(num_microbatches, 2 * num_stages - 1)
    stages = []
    for s in range(num_stages):
        order = _v_order(num_stages, s, count)
        stages.append([action for action in order if action.micro_batch < num_microbatches])
    return with_messages(stages, Line(num_stages=num_stages, num_chunks=2, zigzag=True))


def _v_order(p: int, s: int, count: int) -> Iterable[Action]:
    """Write the phases of ZB-V as kinds and chunks; micro-batches are counted for each of them."""
    f0, b0, w0 = _words(0)
    f1, b1, w1 = _words(1)
    words = [f0] * (2 * (p - s) - 1) + [f1, f0] * s + [f1, b1, w1] * (p - s)
    words += [f0, b0, w0, f1, b1, w1] * (count - words.count(f0))
    words += [b0, w0, f1, b1, w1] * (count - words.count(f1))
    words += [b0, b1] * s + [b0, w0] * (p - s)
    for weight in (w1, w0):
        words += [weight] * (count - words.count(weight))
    seen = dict.fromkeys(words, 0)
    for word in words:
        kind, chunk = word
        yield Action(kind, s, chunk, seen[word])
        seen[word] += 1


def _words(chunk: int) -> tuple[tuple[Kind, int], tuple[Kind, int], tuple[Kind, int]]:
    return ("F", chunk), ("B", chunk), ("W", chunk)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "1f1b": one_f_one_b,
        "gpipe": gpipe,
        "interleaved": interleaved,
        "zb-h1": zero_bubble,
        "zb-v": zero_bubble_v,
    }
)
"""The schedules by the names that configurations use."""

PAIRED = ("1f1b", "interleaved")
"""Those that can pair a forward with the backward of another micro-batch."""


def make_schedule(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    *,
    chunks: int = 1,
    group_size: int | None = None,
    paired: bool = False,
) -> Schedule:
    """Return the schedule of a name in `SCHEDULES`.

    chunks: how many each stage holds; 2 or more for interleaved, 2 for zb-v, 1 for the others.
    group_size: of interleaved. paired: of 1f1b and interleaved. ValueError says which values fit.
    """
    check_kind(kind, chunks=chunks, group_size=group_size, paired=paired)
    if kind == "interleaved":
        return interleaved(
            num_stages, num_microbatches, chunks=chunks, group_size=group_size, paired=paired
        )
    if kind == "1f1b":
        return one_f_one_b(num_stages, num_microbatches, paired=paired)
    return SCHEDULES[kind](num_stages, num_microbatches)


def check_kind(
    kind: str, *, chunks: int, group_size: int | None = None, paired: bool = False
) -> None:
    """Check what can be checked of `make_schedule`'s arguments without sizes; ValueError."""
    if kind not in SCHEDULES:
        near = difflib.get_close_matches(kind, SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"schedule {kind!r}: {hint}valid are {', '.join(SCHEDULES)}")
    if kind == "interleaved" and chunks < 2:
        raise ValueError(f"schedule interleaved with chunks = {chunks}: use chunks 2 or more")
    if kind == "zb-v" and chunks != 2:
        raise ValueError(f"schedule zb-v with chunks = {chunks}: use chunks = 2")
    if kind not in ("interleaved", "zb-v") and chunks != 1:
        raise ValueError(
            f"schedule {kind} with chunks = {chunks}: use chunks = 1, or schedule interleaved"
        )
    if group_size is not None and kind != "interleaved":
        raise ValueError(
            f"schedule {kind} has no groups of micro-batches: leave out {group_size}, "
            f"or use schedule interleaved"
        )
    if paired and kind not in PAIRED:
        raise ValueError(
            f"schedule {kind} has no pairs of a forward and another micro-batch's backward: use "
            f"schedule {' or '.join(PAIRED)}"
        )


def _alternate(
    forwards: list[Action], backwards: list[Action], ahead: int, paired: bool = False
) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the rest.

    Pairs need one forward more ahead: that of the last chunk of all is followed by its backward.
    """
    ahead = min(ahead + paired, len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [replace(forward, paired=paired), backward]
    return actions + backwards[len(forwards) - ahead :]


def _groups(count: int, size: int, least: int) -> list[range]:
    full, rest = divmod(count, size)
    if rest >= least or not full:
        sizes = [size] * full + [rest] * (rest > 0)
    else:
        even, larger = divmod(count, full)
        sizes = [even + 1] * larger + [even] * (full - larger)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _positive(num_stages: int, num_microbatches: int, chunks: int = 1) -> None:
    numbers = {"stages": num_stages, "micro-batches": num_microbatches, "chunks": chunks}
    for what, number in numbers.items():
        if number < 1:
            raise ValueError(f"a pipeline schedule needs at least 1 of {what}, not {number}")

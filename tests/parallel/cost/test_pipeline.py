import dataclasses
import itertools

import pytest

from mcore_parallel import ParallelConfig, make_schedule
from mcore_parallel.cost.pipeline import Halves, live_chunks, pipeline_time
from mcore_parallel.pipeline import Action, simulate


def config(
    kind: str, pp: int, chunks: int, group: int | None = None, paired: bool = False
) -> ParallelConfig:
    parallel = ParallelConfig(pp=pp, schedule=kind, chunks=chunks, microbatch_group=group)
    return dataclasses.replace(parallel, ep=2, overlap_expert_exchange=True) if paired else parallel


KINDS = [("gpipe", 1, False), ("1f1b", 1, False), ("interleaved", 2, False)]
KINDS += [("interleaved", 4, False), ("zb-h1", 1, False), ("zb-v", 2, False)]
KINDS += [("1f1b", 1, True), ("interleaved", 2, True)]


@pytest.mark.parametrize(("kind", "chunks", "paired"), KINDS)
def test_live_activations_are_those_of_the_schedule(kind: str, chunks: int, paired: bool) -> None:
    for pp, m, extra in itertools.product((2, 3, 4), (1, 2, 5, 8, 11), (0, 3)):
        group = pp + extra if kind == "interleaved" else None
        schedule = make_schedule(kind, pp, m, chunks=chunks, group_size=group, paired=paired)
        layout = config(kind, pp, chunks, group, paired)
        found = tuple(live_chunks(layout, stage, m) for stage in range(pp))
        peaks = simulate(schedule).peak_activations
        if kind in ("zb-h1", "zb-v"):  # said of the fullest stage, for all
            assert max(peaks) <= found[0] <= max(peaks) + 1, (pp, m)
        else:
            assert found == peaks, (pp, m, group)


def uneven(count: int) -> list[Halves]:
    """Chunks of nearly equal time, the last one longer (it has the head)."""
    times = [(1.0 + 0.02 * (i % 3), 1.1, 0.9) for i in range(count)]
    return [*times[:-1], (1.3, 1.4, 1.1)]


def simulated(layout: ParallelConfig, m: int, transfer: float) -> float:
    """All micro-batches one by one."""
    kind, pp, chunks = layout.schedule, layout.pp, layout.chunks
    schedule = make_schedule(kind, pp, m, chunks=chunks, paired=layout.overlap_expert_exchange)
    halves, line, split = uneven(pp * chunks), schedule.line, schedule.splits_backward

    def duration(action: Action) -> float:
        if action.is_receive or action.is_send:
            return transfer if action.is_send else 0.0
        forward, backward, weight = halves[line.position(action.stage, action.chunk)]
        if action.kind == "B":
            return backward if split else backward + weight
        return forward if action.kind == "F" else weight

    return simulate(schedule, duration).makespan


@pytest.mark.parametrize(("kind", "chunks", "paired"), KINDS)
@pytest.mark.parametrize("transfer", [0.0, 0.05])
def test_few_micro_batches_tell_the_time_of_many(
    kind: str, chunks: int, paired: bool, transfer: float
) -> None:
    for pp, m in ((4, 3), (4, 21), (5, 25)):
        layout = config(kind, pp, chunks, paired=paired)
        halves = uneven(pp * chunks)
        whole = simulated(layout, m, transfer)
        found = pipeline_time(layout, halves, m, transfer)
        assert found.seconds == pytest.approx(whole, rel=0.01), (pp, m)
        assert found.seconds == pytest.approx(found.busy + found.bubble + found.transfers)
        if m >= 2 * pp:  # the formulas are for full pipelines
            quick = pipeline_time(layout, halves, m, transfer, simulated=False)
            assert quick.seconds == pytest.approx(whole, rel=0.05), (pp, m)
            assert quick.busy == found.busy


def test_the_bubble_of_equal_stages_is_that_of_the_papers() -> None:
    equal: list[Halves] = [(1.0, 1.0, 1.0)] * 16
    for kind, chunks, bubble in (
        ("1f1b", 1, 3 / (12 + 3)),
        ("interleaved", 4, 3 / (4 * 12 + 3)),
        ("zb-h1", 1, 1 / (12 + 1)),
    ):
        layout = config(kind, 4, chunks)
        for quick in (True, False):
            halves = equal[: 4 * chunks]
            found = pipeline_time(layout, halves, 12, 0.0, simulated=not quick)
            assert found.bubble / found.seconds == pytest.approx(bubble)


def test_one_stage_waits_for_nobody() -> None:
    found = pipeline_time(ParallelConfig(), [(1.0, 2.0, 3.0)], 7, 0.0)
    assert (found.seconds, found.bubble, found.transfers, found.busy) == (42.0, 0.0, 0.0, 42.0)

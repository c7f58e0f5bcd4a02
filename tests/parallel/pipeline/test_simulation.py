import pytest

from mcore_parallel.pipeline import (
    Action,
    OpTimes,
    Schedule,
    chunk_times,
    gpipe,
    make_schedule,
    one_f_one_b,
    simulate,
)


def test_transfer_time_delays_the_receiver_only():
    found = simulate(gpipe(2, 1), OpTimes(forward=1, backward=2, transfer=10))
    spans = {(s.action.stage, s.action.kind): (s.start, s.end) for x in found.spans for s in x}
    assert spans == {(0, "F"): (0, 1), (1, "F"): (11, 12), (1, "B"): (12, 14), (0, "B"): (24, 26)}
    assert found.makespan == 26
    assert found.bubble_fraction == pytest.approx(1 - 6 / 52)


def test_the_slowest_stage_sets_the_pace():
    def duration(action: Action) -> float:
        return (2.0 if action.stage == 1 else 1.0) if action.kind in "FB" else 0.0

    m = 50
    found = simulate(one_f_one_b(3, m), duration)
    assert found.busy == (2 * m, 4 * m, 2 * m)
    assert 4 * m < found.makespan <= 4 * m + 8


def test_a_weight_gradient_half_holds_the_activations_until_it_is_done():
    actions = [Action(kind, 0, 0, i) for kind in "FBW" for i in range(2)]
    found = simulate(Schedule([actions]), OpTimes(forward=1, backward=1, weight=1))
    assert found.peak_activations == (2,)
    assert found.makespan == 6
    split = Schedule([[Action(kind, 0, 0, i) for i in range(2) for kind in "FBW"]])
    assert simulate(split).peak_activations == (1,)


@pytest.mark.parametrize(("exchange", "saved"), [(0.0, 0.0), (0.5, 1.0), (3.0, 4.0), (9.0, 10.0)])
def test_a_pair_hides_messages_behind_what_the_other_computes(exchange, saved):
    """All of them at best; a pair takes at least as long as its longer half."""
    m, times = 6, {"forward": 1.0, "backward": 2.0, "weight": 0.0, "exchange": exchange}
    alone = one_f_one_b(1, m)
    paired = one_f_one_b(1, m, paired=True)
    took = simulate(alone, chunk_times(alone, **times)).makespan
    assert took == m * (3 + 2 * exchange)
    found = simulate(paired, chunk_times(paired, **times))
    assert found.makespan == took - (m - 1) * saved
    assert sum(span.beside is not None for span in found.spans[0]) == m - 1
    assert found.busy == (found.makespan,)
    assert simulate(paired, lambda action: 1.0).makespan == 2 * m  # nothing is known to be hidden


def test_nothing_to_do():
    found = simulate(Schedule([[]]))
    assert (found.makespan, found.bubble_fraction, found.peak_activations) == (0.0, 0.0, (0,))


def test_times_of_a_stage_are_cut_over_its_chunks_and_joined_without_a_split():
    times = {"forward": 2.0, "backward": 4.0, "weight": 6.0, "transfer": 0.5}
    whole = chunk_times(make_schedule("1f1b", 2, 2), **times)
    assert whole == OpTimes(forward=2.0, backward=10.0, weight=0.0, transfer=0.5)
    split = chunk_times(make_schedule("zb-v", 2, 2, chunks=2), **times)
    assert split == OpTimes(forward=1.0, backward=2.0, weight=3.0, transfer=0.5)
    for kind, chunks in (("gpipe", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)):
        schedule = make_schedule(kind, 3, 5, chunks=chunks)
        assert simulate(schedule, chunk_times(schedule, **times)).busy == pytest.approx((60.0,) * 3)

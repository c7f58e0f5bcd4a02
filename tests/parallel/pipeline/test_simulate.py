import pytest

from mcore_parallel.pipeline import Action, OpTimes, gpipe, one_f_one_b, simulate


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
    schedule = [[Action(kind, 0, 0, i) for kind in "FB" for i in range(2)]]
    schedule[0] += [Action("W", 0, 0, i) for i in range(2)]
    found = simulate(schedule, OpTimes(forward=1, backward=1, weight=1))
    assert found.peak_activations == (2,)
    assert found.makespan == 6
    split = [[Action(kind, 0, 0, i) for i in range(2) for kind in "FBW"]]
    assert simulate(split).peak_activations == (1,)


def test_nothing_to_do():
    found = simulate([[]])
    assert (found.makespan, found.bubble_fraction, found.peak_activations) == (0.0, 0.0, (0,))

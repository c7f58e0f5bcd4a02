from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline import (
    SCHEDULES,
    Action,
    Line,
    OpTimes,
    check,
    chunk_times,
    gpipe,
    interleaved,
    make_schedule,
    num_chunks,
    one_f_one_b,
    simulate,
    with_messages,
    zero_bubble,
    zero_bubble_v,
)

sizes = st.integers(1, 16)
few = settings(max_examples=30, deadline=None)


def made(kind, p, m, chunks=2):
    return make_schedule(kind, p, m, chunks=chunks if kind in ("interleaved", "zb-v") else 1)


def run(schedule, **times):
    """Simulate with times of a whole stage; makespan, bubble, peak in stages' activations."""
    found = simulate(schedule, chunk_times(schedule, **times))
    peaks = tuple(peak / schedule.line.num_chunks for peak in found.peak_activations)
    return found.makespan, found.bubble_fraction, peaks


@pytest.mark.parametrize("kind", SCHEDULES)
@few
@given(p=sizes, m=sizes)
def test_every_schedule_passes_the_checker(kind, p, m):
    schedule = made(kind, p, m)
    check(schedule, num_microbatches=m)
    check(schedule.forward_only(), num_microbatches=m)


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 9), m=st.integers(1, 24), v=st.integers(1, 5), extra=st.integers(0, 12))
def test_interleaved_takes_any_chunks_groups_and_micro_batches(p, m, v, extra):
    schedule = interleaved(p, m, chunks=v, group_size=p + extra)
    check(schedule, num_microbatches=m)
    check(schedule.forward_only(), num_microbatches=m)
    if m >= p:
        bubble = simulate(schedule).bubble_fraction
        assert bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_bubble_is_p_minus_1_over_m_plus_p_minus_1(kind, p):
    for m in (1, p, p + 3, 4 * p):
        found = simulate(SCHEDULES[kind](p, m), OpTimes(forward=1.0, backward=2.0))
        assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert found.makespan == pytest.approx((m + p - 1) * 3.0)
        assert found.busy == pytest.approx((3.0 * m,) * p)


@pytest.mark.parametrize("p", range(1, 17))
def test_interleaved_bubble_is_p_minus_1_over_v_m_plus_p_minus_1(p):
    for m, v in ((p, 2), (p, 4), (3 * p, 2), (2 * p, 3)):
        makespan, bubble, peaks = run(interleaved(p, m, chunks=v))
        assert bubble == pytest.approx((p - 1) / (v * m + p - 1))
        assert makespan == pytest.approx(3 * m + 3 * (p - 1) / v)
        assert peaks[0] * v == min(v * m, 2 * (p - 1) + (v - 1) * p + 1)
        assert max(peaks) == peaks[0]


TIMES = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 0.75, 1.5), (2.0, 1.0, 0.5)]


@pytest.mark.parametrize("p", range(2, 17))
def test_zero_bubble_is_strictly_smaller_at_the_same_peak_memory(p):
    for m in (p, p + 1, 2 * p):
        plain, split, v_shaped = one_f_one_b(p, m), zero_bubble(p, m), zero_bubble_v(p, m)
        for forward, backward, weight in TIMES if m == p + 1 else TIMES[:1]:
            times = {"forward": forward, "backward": backward, "weight": weight}
            plain_end, plain_bubble, plain_peaks = run(plain, **times)
            split_end, split_bubble, split_peaks = run(split, **times)
            assert split_bubble < plain_bubble
            assert max(split_peaks) == max(plain_peaks) == p
            work = m * (forward + backward + weight)
            assert plain_end == pytest.approx(work + (p - 1) * (forward + backward + weight))
            assert split_end == pytest.approx(
                work + (p - 1) * (forward + max(0, backward - weight))
            )
            v_end, _, v_peaks = run(v_shaped, **times)
            assert v_end <= split_end + 1e-9
            assert max(v_peaks) <= p


@pytest.mark.parametrize("p", range(1, 17))
def test_zb_v_leaves_only_the_start_for_equal_times(p):
    for m in (2 * p - 1, 2 * p):
        makespan, _, peaks = run(zero_bubble_v(p, m))
        assert makespan == pytest.approx(3 * m + (p - 1) / 2)
        assert peaks == (p,) * p


@few
@given(p=sizes, m=sizes)
def test_peak_activations(p, m):
    assert simulate(one_f_one_b(p, m)).peak_activations == tuple(min(m, p - s) for s in range(p))
    assert simulate(gpipe(p, m)).peak_activations == (m,) * p
    assert simulate(zero_bubble(p, m)).peak_activations == (min(m, p),) * p


@settings(max_examples=40, deadline=None)
@given(p=st.integers(1, 9), m=st.integers(1, 24), v=st.integers(1, 4), extra=st.integers(0, 6))
def test_pairs_fit_every_pipeline_and_cost_memory_but_no_time(p, m, v, extra):
    options = {"chunks": v, "group_size": p + extra}
    schedule, plain = interleaved(p, m, **options, paired=True), interleaved(p, m, **options)
    check(schedule, num_microbatches=m)
    check(schedule.forward_only(), num_microbatches=m)
    assert not any(action.paired for actions in schedule.forward_only() for action in actions)
    pairs = [sum(action.paired for action in actions) for actions in schedule]
    found, without = simulate(schedule), simulate(plain)
    if v == 1:
        assert pairs == [max(0, m - 2 * (p - s) + 1) for s in range(p)]
        assert found.peak_activations == tuple(min(m, 2 * (p - s)) for s in range(p))
    if m >= (2 * p if v == 1 else p):
        assert found.makespan == pytest.approx(without.makespan)


def words(actions):
    return " ".join(f"{a.kind}{a.micro_batch}" + f".{a.chunk}" * (a.chunk > 0) for a in actions)


def test_one_f_one_b_of_two_stages_reads_as_in_the_paper():
    first, last = map(words, one_f_one_b(2, 2))
    assert first == "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1"
    assert last == "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1"


def test_messages_that_were_sent_earlier_are_received_earlier():
    """Interleaved on two stages: activations and gradients share each direction."""
    first, last = map(words, interleaved(2, 2, chunks=2))
    assert first == (
        "F0 SEND_F0 F1 SEND_F1 RECV_F0.1 F0.1 SEND_F0.1 RECV_F1.1 F1.1 SEND_F1.1 "
        "RECV_B0.1 B0.1 SEND_B0.1 RECV_B1.1 B1.1 SEND_B1.1 RECV_B0 B0 RECV_B1 B1"
    )
    assert last == (
        "RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_F0.1 F0.1 B0.1 SEND_B0.1 RECV_F1.1 F1.1 B1.1 "
        "SEND_B1.1 RECV_B0 B0 SEND_B0 RECV_B1 B1 SEND_B1"
    )
    late = [[Action("F", 0, 0, 0), Action("F", 0, 0, 1)], [Action("F", 1, 0, i) for i in (1, 0)]]
    schedule = with_messages(late, Line(num_stages=2))
    assert words(schedule[1]) == "RECV_F0 RECV_F1 F1 F0"
    check(schedule)


def test_messages_of_a_pair_come_before_it_and_after_it():
    first, last = map(words, one_f_one_b(2, 5, paired=True))
    assert first == (
        "F0 SEND_F0 F1 SEND_F1 F2 SEND_F2 RECV_B0 F3 B0 SEND_F3 RECV_B1 F4 B1 SEND_F4 "
        "RECV_B2 B2 RECV_B3 B3 RECV_B4 B4"
    )
    assert last == (
        "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 RECV_F2 F2 B1 SEND_B1 RECV_F3 F3 B2 SEND_B2 "
        "RECV_F4 F4 B3 SEND_B3 B4 SEND_B4"
    )


def test_one_stage_needs_no_messages():
    assert words(one_f_one_b(1, 3)[0]) == "F0 B0 F1 B1 F2 B2"
    assert words(interleaved(1, 2, chunks=2)[0]) == "F0 F0.1 B0.1 F1 B0 F1.1 B1.1 B1"
    assert words(zero_bubble_v(1, 1)[0]) == "F0 F0.1 B0.1 W0.1 B0 W0"


def test_a_v_turns_on_the_last_stage_without_a_message():
    first, last = map(words, zero_bubble_v(2, 1))
    assert first == "F0 SEND_F0 RECV_F0.1 F0.1 B0.1 SEND_B0.1 W0.1 RECV_B0 B0 W0"
    assert last == "RECV_F0 F0 F0.1 SEND_F0.1 RECV_B0.1 B0.1 W0.1 B0 SEND_B0 W0"


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    ("p", "m", "what"), [(0, 1, "stages"), (1, 0, "micro-batches"), (2, -3, "micro-batches")]
)
def test_numbers_must_be_positive(kind, p, m, what):
    with pytest.raises(ValueError, match=f"at least 1 of {what}, not {min(p, m)}"):
        made(kind, p, m)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("zb", {}, r"schedule 'zb': did you mean 'zb-v'\? valid are 1f1b, gpipe, interl"),
        ("interleaved", {}, "interleaved with chunks = 1: use chunks 2 or more"),
        ("1f1b", {"chunks": 2}, "1f1b with chunks = 2: use chunks = 1, or schedule interleaved"),
        ("zb-v", {"chunks": 3}, "zb-v with chunks = 3: use chunks = 2"),
        ("zb-v", {"chunks": 2, "paired": True}, "zb-v has no pairs .* use schedule 1f1b or interl"),
        ("zb-h1", {"group_size": 8}, "zb-h1 has no groups of micro-batches: leave out 8"),
        ("interleaved", {"chunks": 2, "group_size": 3}, "group of 3 .* use a group size of 4 or"),
    ],
)
def test_options_that_do_not_fit(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(kind, 4, 8, **options)
    with pytest.raises(ValueError, match="at least 1 of chunks, not 0"):
        interleaved(2, 2, chunks=0)


def test_partners_wrap_from_the_last_stage_to_the_next_chunk():
    line = Line(num_stages=4, num_chunks=2)
    sent = Action("SEND_F", 3, 0, 7)
    assert line.partner(sent) == Action("RECV_F", 0, 1, 7)
    assert line.partner(line.partner(sent)) == sent
    back = Action("SEND_B", 0, 1, 7)
    assert line.partner(back) == Action("RECV_B", 3, 0, 7)
    assert line.partner(Action("SEND_F", 1, 1, 0)) == Action("RECV_F", 2, 1, 0)
    assert num_chunks([sent, back]) == 2


@given(p=st.integers(1, 9), v=st.integers(1, 5), zigzag=st.booleans())
def test_places_and_positions_are_each_others_inverse(p, v, zigzag):
    line = Line(num_stages=p, num_chunks=v, zigzag=zigzag)
    places = [line.place(position) for position in range(p * v)]
    assert sorted(places) == [(s, c) for s in range(p) for c in range(v)]
    assert [line.position(*place) for place in places] == list(range(p * v))
    if zigzag:
        assert all(abs(a[0] - b[0]) <= 1 for a, b in pairwise(places))

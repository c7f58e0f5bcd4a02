import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline import (
    SCHEDULES,
    Action,
    OpTimes,
    check,
    gpipe,
    num_chunks,
    one_f_one_b,
    partner,
    simulate,
)

sizes = st.integers(1, 16)
few = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize("kind", SCHEDULES)
@few
@given(p=sizes, m=sizes)
def test_every_schedule_passes_the_checker(kind, p, m):
    check(SCHEDULES[kind](p, m), num_microbatches=m)


@pytest.mark.parametrize("kind", SCHEDULES)
@few
@given(p=sizes, m=sizes)
def test_forward_half_alone_passes_the_checker(kind, p, m):
    schedule = [[a for a in actions if not a.is_backward] for actions in SCHEDULES[kind](p, m)]
    check(schedule, num_microbatches=m)


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("kind", SCHEDULES)
def test_bubble_is_p_minus_1_over_m_plus_p_minus_1(kind, p):
    for m in (1, p, p + 3, 4 * p):
        found = simulate(SCHEDULES[kind](p, m), OpTimes(forward=1.0, backward=2.0))
        assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert found.makespan == pytest.approx((m + p - 1) * 3.0)
        assert found.busy == pytest.approx((3.0 * m,) * p)


@few
@given(p=sizes, m=sizes)
def test_peak_activations(p, m):
    assert simulate(one_f_one_b(p, m)).peak_activations == tuple(min(m, p - s) for s in range(p))
    assert simulate(gpipe(p, m)).peak_activations == (m,) * p


def test_one_f_one_b_of_two_stages_reads_as_in_the_paper():
    first, last = ([str(a.kind) + str(a.micro_batch) for a in s] for s in one_f_one_b(2, 2))
    assert first == ["F0", "SEND_F0", "F1", "SEND_F1", "RECV_B0", "B0", "RECV_B1", "B1"]
    assert last == ["RECV_F0", "F0", "B0", "SEND_B0", "RECV_F1", "F1", "B1", "SEND_B1"]


def test_one_stage_needs_no_messages():
    assert [a.kind for a in one_f_one_b(1, 3)[0]] == ["F", "B"] * 3


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    ("p", "m", "what"), [(0, 1, "stages"), (1, 0, "micro-batches"), (2, -3, "micro-batches")]
)
def test_numbers_must_be_positive(kind, p, m, what):
    with pytest.raises(ValueError, match=f"at least 1 of {what}, not {min(p, m)}"):
        SCHEDULES[kind](p, m)


def test_partners_wrap_from_the_last_stage_to_the_next_chunk():
    sent = Action("SEND_F", 3, 0, 7)
    assert partner(sent, 4) == Action("RECV_F", 0, 1, 7)
    assert partner(partner(sent, 4), 4) == sent
    back = Action("SEND_B", 0, 1, 7)
    assert partner(back, 4) == Action("RECV_B", 3, 0, 7)
    assert partner(Action("SEND_F", 1, 1, 0), 4) == Action("RECV_F", 2, 1, 0)
    assert num_chunks([sent, back]) == 2

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.pipeline import (
    Action,
    Line,
    Schedule,
    check,
    make_schedule,
    one_f_one_b,
    simulate,
)


def stage_list(text: str, stage: int) -> list[Action]:
    """Read "F0 B0 SEND_F1.2" (kind, micro-batch, optional .chunk)."""
    actions = []
    for word in text.split():
        name, _, chunk = word.partition(".")
        kind = name.rstrip("0123456789")
        actions.append(Action(kind, stage, int(chunk or 0), int(name[len(kind) :])))
    return actions


def read(*stages: str, line: Line | None = None) -> Schedule:
    return Schedule([stage_list(text, i) for i, text in enumerate(stages)], line)


GOOD = ("F0 SEND_F0 RECV_B0 B0", "RECV_F0 F0 B0 SEND_B0")


def test_good():
    check(read(*GOOD))


def test_two_chunks_on_two_stages():
    """The line of four chunks runs 0.0 1.0 0.1 1.1 (stage.chunk)."""
    schedule = read(
        "F0 SEND_F0 RECV_F0.1 F0.1 SEND_F0.1 RECV_B0.1 B0.1 SEND_B0.1 RECV_B0 B0",
        "RECV_F0 F0 SEND_F0 RECV_F0.1 F0.1 B0.1 SEND_B0.1 RECV_B0 B0 SEND_B0",
    )
    check(schedule)
    assert simulate(schedule).peak_activations == (2, 2)


def test_split_weight_gradients():
    schedule = read("F0 SEND_F0 RECV_B0 B0 W0", "RECV_F0 F0 B0 SEND_B0 W0")
    check(schedule)
    with pytest.raises(ValueError, match="stage 0, W of chunk 0, micro-batch 0: is missing"):
        check(Schedule([[a for a in schedule[0] if a.kind != "W"], schedule[1]]))


def test_a_forward_is_paired_with_the_backward_of_another_micro_batch():
    def pairing(text: str) -> Schedule:
        actions = stage_list(text, 0)
        return Schedule([[replace(a, paired=a.kind == "F" and a.micro_batch > 0) for a in actions]])

    check(pairing("F0 F1 B0 B1"))
    for text, message in (
        ("F0 B0 F1 B1", "micro-batch 1, paired: is paired with the B of chunk 0, .* may need it"),
        ("F0 F1 F2 B0 B1 B2", "micro-batch 1, paired: only an F is paired, with a B .* not F of"),
        ("F0 B0 F1", "is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            check(pairing(text))
    backward = replace(Action("B", 0, 0, 0), paired=True)
    with pytest.raises(ValueError, match="B of chunk 0, micro-batch 0, paired: only an F"):
        check(Schedule([[Action("F", 0, 0, 0), backward]]))


V = Line(num_stages=2, num_chunks=2, zigzag=True)
V_GOOD = (
    "F0 SEND_F0 RECV_F0.1 F0.1 B0.1 SEND_B0.1 RECV_B0 B0",
    "RECV_F0 F0 F0.1 SEND_F0.1 RECV_B0.1 B0.1 B0 SEND_B0",
)


def test_chunks_next_to_each_other_on_a_stage_need_no_message():
    """The line 0.0 1.0 1.1 0.1 turns on stage 1."""
    check(read(*V_GOOD, line=V))
    for wrong, message in (
        (
            "RECV_F0 F0.1 F0 SEND_F0.1 RECV_B0.1 B0.1 B0 SEND_B0",
            "F of chunk 1, .* the F of chunk 0",
        ),
        (
            "RECV_F0 F0 F0.1 SEND_F0.1 RECV_B0.1 B0 B0.1 SEND_B0",
            "B of chunk 0, .* the B of chunk 1",
        ),
        ("RECV_F0 F0 SEND_F0 " + V_GOOD[1][11:], "SEND_F of chunk 0, .*: has no place"),
    ):
        with pytest.raises(ValueError, match=rf"^stage 1, {message}"):
            check(read(V_GOOD[0], wrong, line=V))


def test_the_line_has_as_many_stages_as_the_schedule():
    with pytest.raises(ValueError, match="the schedule has 2 stages, its line 3"):
        check(read(*GOOD, line=Line(num_stages=3)))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (("F0 RECV_B0 B0", GOOD[1]), r"^stage 0, SEND_F of chunk 0, micro-batch 0: is missing"),
        ((GOOD[0], "F0 B0 SEND_B0"), r"^stage 1, RECV_F of chunk 0, micro-batch 0: is missing"),
        (
            (GOOD[0], "F0 RECV_F0 B0 SEND_B0"),
            r"^stage 1, F of chunk 0, micro-batch 0: comes before the RECV_F",
        ),
        (
            (GOOD[0], "RECV_F0 F0 SEND_B0 B0"),
            r"^stage 1, SEND_B of chunk 0, micro-batch 0: comes before the B",
        ),
        (("F0 SEND_F0 RECV_B0 B0 F0", GOOD[1]), r"^stage 0, F .*: stands there twice"),
        ((GOOD[0], GOOD[1] + " SEND_F0"), r"^stage 1, SEND_F .*: has no place in a schedule of 2"),
        (("RECV_F0 " + GOOD[0], GOOD[1]), r"^stage 0, RECV_F .*: has no place"),
        (
            (
                "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                "RECV_F1 F1 RECV_F0 F0 B0 SEND_B0 B1 SEND_B1",
            ),
            r"^stage 1, RECV_F of chunk 0, micro-batch 1: stage 0 sends stage 1 the RECV_F of "
            r"chunk 0, micro-batch 0 at this point",
        ),
    ],
)
def test_faults_name_stage_action_and_micro_batch(stages, message):
    with pytest.raises(ValueError, match=message):
        check(read(*stages))


def test_action_in_the_wrong_list():
    with pytest.raises(ValueError, match=r"stage 1, RECV_F .*: stands in the list of stage 0"):
        check(
            Schedule([[*stage_list(GOOD[0], 0), Action("RECV_F", 1, 0, 0)], stage_list(GOOD[1], 1)])
        )


def test_missing_micro_batch():
    with pytest.raises(ValueError, match=r"^stage 0, B of chunk 0, micro-batch 4: is missing"):
        check(one_f_one_b(2, 4), num_microbatches=5)


def test_deadlock_names_every_stage_that_waits():
    schedule = read(
        "F0 SEND_F0 RECV_B0 B0 F1 SEND_F1 RECV_B1 B1",
        "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1",
    )
    with pytest.raises(ValueError, match="deadlocks") as caught:
        check(schedule)
    assert "stage 0 waits for stage 1 in RECV_B of chunk 0, micro-batch 0" in str(caught.value)
    assert "stage 1 waits for stage 0 in RECV_F of chunk 0, micro-batch 1" in str(caught.value)


def test_empty():
    with pytest.raises(ValueError, match="no stage"):
        check(Schedule([]))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v"]),
    p=st.integers(2, 5),
    m=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_losing_or_moving_an_action_is_noticed_or_harmless(kind, p, m, seed):
    """A mutated schedule that passes can really be run to its end; a lost action never passes."""
    rng = random.Random(seed)
    right = make_schedule(kind, p, m, chunks=2 if kind in ("interleaved", "zb-v") else 1)
    lists = [list(actions) for actions in right]
    actions = lists[rng.randrange(p)]
    action = actions.pop(rng.randrange(len(actions)))
    with pytest.raises(ValueError, match=f"stage {action.stage}, "):
        check(Schedule(lists, right.line), num_microbatches=m)
    actions.insert(rng.randrange(len(actions) + 1), action)
    moved = Schedule(lists, right.line)
    try:
        check(moved, num_microbatches=m)
    except ValueError:
        return
    computing = sum(action.kind in "FBW" for actions in right for action in actions)
    assert sum(len(spans) for spans in simulate(moved).spans) == computing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_parallel import stage_layers


def test_layers_that_do_not_divide_are_all_placed() -> None:
    """Case U04: 30 layers over 4 stages, no other setting."""
    stages = stage_layers(30, 4)
    assert [len(stage) for stage in stages] == [8, 8, 7, 7]
    assert [layer for stage in stages for layer in stage] == list(range(30))


@given(num_layers=st.integers(1, 200), pp=st.integers(1, 40))
def test_default_covers_every_layer_once_and_evenly(num_layers: int, pp: int) -> None:
    if num_layers < pp:
        with pytest.raises(ValueError, match=f"{num_layers} layers are fewer than pp = {pp}"):
            stage_layers(num_layers, pp)
        return
    stages = stage_layers(num_layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    lengths = [len(stage) for stage in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=10))
def test_given_counts_are_kept_in_execution_order(counts: list[int]) -> None:
    """Case U05: uneven first and last stages; ids over the stages are exactly 0 … n-1."""
    stages = stage_layers(sum(counts), len(counts), counts)
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(sum(counts)))


def test_interleaved_chunks_run_in_the_order_of_their_ids() -> None:
    """Case U05: 10 layers, 2 stages of 2 chunks, the last of them with 4 layers."""
    pp, chunks = 2, 2
    entries = stage_layers(10, pp * chunks, [2, 2, 2, 4])
    held = {stage: [entries[c * pp + stage] for c in range(chunks)] for stage in range(pp)}
    assert [list(chunk) for chunk in held[1]] == [[2, 3], [6, 7, 8, 9]]
    executed = [layer for c in range(chunks) for s in range(pp) for layer in held[s][c]]
    assert executed == list(range(10))


@pytest.mark.parametrize(
    ("num_layers", "pp", "counts", "message"),
    [
        (10, 2, [4], r"\[4\] has 1 counts for pp = 2 pipeline stages"),
        (10, 2, [4, 4], r"\[4, 4\] sum to 8, not to 10 layers; an even split is \[5, 5\]"),
        (30, 4, [7, 7, 7, 7], r"sum to 28, not to 30 layers; an even split is \[8, 8, 7, 7\]"),
        (3, 2, [4, -1], "a stage cannot hold -1 layers"),
        (3, 4, None, "3 layers are fewer than pp = 4 pipeline stages; use pp ≤ 3 or"),
        (3, 0, None, "3 layers over 0 pipeline stages"),
    ],
)
def test_counts_that_do_not_cover_the_layers_are_rejected(
    num_layers: int, pp: int, counts: list[int] | None, message: str
) -> None:
    """Case U05: only one stage's count given is a clear rejection, never a wrong offset."""
    with pytest.raises(ValueError, match=message):
        stage_layers(num_layers, pp, counts)

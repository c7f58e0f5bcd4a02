import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_parallel import stage_layers
from mcore_parallel.pipeline import Line
from mcore_parallel.stages import StageLayout


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
    entries = stage_layers(10, pp, [2, 2, 2, 4], chunks=chunks)
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


@given(
    num_layers=st.integers(0, 120),
    pp=st.integers(1, 8),
    chunks=st.integers(1, 4),
    zigzag=st.booleans(),
    first=st.none() | st.integers(0, 20),
    last=st.none() | st.integers(0, 20),
)
def test_given_ends_are_kept_or_refused(
    num_layers: int, pp: int, chunks: int, zigzag: bool, first: int | None, last: int | None
) -> None:
    """Case U05: with only the last stage's count set, every layer is still held exactly once."""
    options = {"chunks": chunks, "zigzag": zigzag, "first": first, "last": last}
    try:
        entries = stage_layers(num_layers, pp, **options)  # type: ignore[arg-type]
    except ValueError:
        asked, others = (first or 0) + (last or 0), pp - (first is not None) - (last is not None)
        assert (
            pp == 1 or num_layers - asked < others * chunks or (others == 0 and num_layers != asked)
        )
        return
    assert [layer for entry in entries for layer in entry] == list(range(num_layers))
    line = Line(num_stages=pp, num_chunks=chunks, zigzag=zigzag)
    held = [0] * pp
    for position, entry in enumerate(entries):
        held[line.place(position)[0]] += len(entry)
    assert first is None or held[0] == first
    assert last is None or held[-1] == last
    between = held[(first is not None) : pp - (last is not None)]
    assert not between or max(between) - min(between) <= chunks


def test_the_last_stage_alone_is_given() -> None:
    """Case U05 itself: 10 layers, 2 stages of 2 chunks, 4 layers on the last stage."""
    entries = stage_layers(10, 2, chunks=2, last=4)
    assert [list(e) for e in entries] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("num_layers", "pp", "chunks", "embedding", "loss", "counts"),
    [
        (30, 4, 1, True, True, [7, 8, 8, 7]),
        (30, 4, 1, True, False, [7, 8, 8, 7]),
        (31, 4, 1, False, True, [8, 8, 8, 7]),
        (14, 4, 2, True, True, [1, 2, 2, 2, 2, 2, 2, 1]),
        (2, 4, 1, True, True, [0, 1, 1, 0]),
        (3, 1, 1, True, True, [3]),
    ],
)
def test_embedding_and_loss_count_as_layers(
    num_layers: int, pp: int, chunks: int, embedding: bool, loss: bool, counts: list[int]
) -> None:
    entries = stage_layers(
        num_layers, pp, chunks=chunks, count_embedding=embedding, count_loss=loss
    )
    assert [len(entry) for entry in entries] == counts
    assert [layer for entry in entries for layer in entry] == list(range(num_layers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 3}, r"10 layers are fewer than pp × chunks = 4 × 3 = 12 .*; use chunks ≤ 2"),
        ({"chunks": 0}, "4 pipeline stages of 0 chunks"),
        ({"counts": [5] * 4, "chunks": 2}, "4 counts for pp = 4 .* of 2 chunks each, 8 in all"),
        ({"first": 9}, r"first = 9 leaves 1 of 10 layers for 3 other .*; together .* 0 to 7"),
        ({"first": 6, "last": 3}, "first = 6 and last = 3 leaves 1 of 10 layers for 2 .* 0 to 8"),
        ({"last": -1}, r"last = -1 leaves 11 of 10 layers"),
        ({"first": 1, "count_loss": True}, "placed in one way: first and last or counting"),
        ({"counts": [1], "last": 1}, "placed in one way: stage_layers or first and last"),
    ],
)
def test_other_placements_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(10, 4, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"first = 2 and last = 2 must place all 6 layers; .* 6"):
        stage_layers(6, 2, first=2, last=2)
    with pytest.raises(ValueError, match="one stage cannot hold first = 2 and last = 2"):
        stage_layers(4, 1, first=2, last=2)
    with pytest.raises(ValueError, match=r"1 layers \(with embedding and loss counted\) are fewer"):
        stage_layers(0, 2, count_loss=True)


@pytest.mark.parametrize(
    ("text", "layers", "predictions"),
    [
        ("EtttL", (3,), (0,)),
        ("Et|tt|tL", (1, 2, 1), (0, 0, 0)),
        ("E|t*3|tL", (0, 3, 1), (0, 0, 0)),
        ("Et*3|(tt|)*2m|L", (3, 2, 2, 0, 0), (0, 0, 0, 1, 0)),
        ("E,t | t , | m m | L", (1, 1, 0, 0), (0, 0, 2, 0)),
        ("E||ttL", (0, 0, 2), (0, 0, 0)),
        ("((Et|)*1(t|)*2)t*0L", (1, 1, 1, 0), (0, 0, 0, 0)),
    ],
)
def test_layout_strings(text: str, layers: tuple[int, ...], predictions: tuple[int, ...]) -> None:
    """The reference's language: repetition, parentheses, empty stages, blanks and commas."""
    layout = StageLayout.parse(text)
    assert layout.layers == layers
    assert layout.predictions == predictions
    assert StageLayout.parse(str(layout)) == layout
    stages = stage_layers(sum(layers), len(layers), layout.layers)
    assert [len(stage) for stage in stages] == list(layers)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), m=st.integers(0, 3))
def test_any_counts_can_be_written(counts: list[int], m: int) -> None:
    stages = ["t" * count for count in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * m + "L"
    if len(counts) == 1:
        stages = ["E" + "t" * counts[0] + "m" * m + "L"]
    layout = StageLayout(stages=tuple(stages))
    assert StageLayout.parse(str(layout)) == layout
    assert list(layout.layers) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tt|L", r"'tt\|L' has 0 E \(embedding\), not 1"),
        ("Et|tLL", r"has 2 L \(loss\), not 1"),
        ("tE|L", r"E \(embedding\) must come first"),
        ("E|Lt", r"L \(loss\) must come last"),
        ("Et|mt|L", r"t \(decoder layer\) number 2 comes after m .* put m after the last t"),
        ("Et|x|L", r"character 3: 'x' is none of E t m L"),
        ("E(t|L", r"1 \( without \)"),
        ("Et)|L", r"character 2: \) closes nothing"),
        ("*3E|L", r"character 0: \*3 repeats nothing"),
        ("Et*|L", r"character 2: '\*' is none of"),
        ("Et*9999999|L", r"character 2: more than 1000000 layers"),
        ("E((t*1000)*1000)*1000L", r"character 16: more than 1000000 layers"),
    ],
)
def test_layout_strings_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageLayout.parse(text)

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.layout import Box, TensorLayout, check_tiling
from mcore_parallel.layout.tiling import first_tiling_error


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """A box cut at random places into parts, which are cut again."""
    dims = draw(st.integers(1, 3))
    start = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    whole = Box(start, tuple(draw(st.integers(1, 5)) for _ in range(dims)))
    parts = [whole]
    for _ in range(draw(st.integers(0, 8))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, dims - 1))
        size = draw(st.integers(0, part.shape[dim]))
        left = (*part.shape[:dim], size, *part.shape[dim + 1 :])
        right = (*part.shape[:dim], part.shape[dim] - size, *part.shape[dim + 1 :])
        moved = (*part.start[:dim], part.start[dim] + size, *part.start[dim + 1 :])
        parts += [Box(part.start, left), Box(moved, right)]
    return whole, draw(st.permutations(parts))


def inside(whole: Box, data: st.DataObject) -> Box:
    start = tuple(
        data.draw(st.integers(a, b - 1)) for a, b in zip(whole.start, whole.stop, strict=True)
    )
    return Box(
        start,
        tuple(data.draw(st.integers(1, b - a)) for a, b in zip(start, whole.stop, strict=True)),
    )


@settings(max_examples=150, deadline=None)
@given(tilings())
def test_every_tiling_is_accepted(tiling: tuple[Box, list[Box]]) -> None:
    assert first_tiling_error(*tiling) is None


@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_every_hole_is_found_first_in_row_major_order(
    tiling: tuple[Box, list[Box]], data: st.DataObject
) -> None:
    whole, parts = tiling
    hole = inside(whole, data)
    kept = [piece for part in parts for piece in part.subtract(hole)]
    error = first_tiling_error(whole, kept)
    assert error is not None
    what, box = error
    assert (what, box.start) == ("missing", hole.start)
    assert hole.contains(box), "the box named is part of what is missing"


@settings(max_examples=150, deadline=None)
@given(tilings(), st.data())
def test_every_overlap_is_found_first_in_row_major_order(
    tiling: tuple[Box, list[Box]], data: st.DataObject
) -> None:
    whole, parts = tiling
    extra = inside(whole, data)
    error = first_tiling_error(whole, [*parts, extra])
    assert error is not None
    what, box = error
    assert (what, box.start) == ("held twice", extra.start)
    assert extra.contains(box)


@settings(max_examples=100, deadline=None)
@given(tilings(), st.data())
def test_a_moved_box_is_an_error_although_the_count_is_right(
    tiling: tuple[Box, list[Box]], data: st.DataObject
) -> None:
    whole, parts = tiling
    moved = data.draw(st.sampled_from([part for part in parts if part.numel]))
    start = tuple(
        data.draw(st.integers(a, b - n))
        for a, b, n in zip(whole.start, whole.stop, moved.shape, strict=True)
    )
    parts = [*(part for part in parts if part is not moved), Box(start, moved.shape)]
    assert (first_tiling_error(whole, parts) is None) == (start == moved.start)


def grouped_query(tp: int, kv_heads: int, rank: int) -> TensorLayout:
    """Fused q/k/v with 8 query heads of size 4 and hidden 6; kv heads repeat over ranks."""
    q = TensorLayout.box("q", (32, 6), Box((32 // tp * rank, 0), (32 // tp, 6)))
    if kv_heads >= tp:
        rows = 4 * kv_heads // tp
        copies, part, index = 1, rank, 0
    else:
        rows = 4
        copies = tp // kv_heads
        part, index = divmod(rank, copies)
    kv = [
        TensorLayout.box(name, (4 * kv_heads, 6), Box((rows * part, 0), (rows, 6)))
        for name in ("k", "v")
    ]
    return TensorLayout.concat([q, *(x.replicated(index, copies) for x in kv)])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_fused_weights_whose_kv_rows_repeat_are_complete(tp: int, kv_heads: int) -> None:
    layouts = [grouped_query(tp, kv_heads, rank) for rank in range(tp)]
    check_tiling(layouts)
    cuts = range(0, layouts[0].numel, 50)
    shards = [x.flat_range(a, min(a + 50, x.numel)) for x in layouts for a in cuts]
    check_tiling(shards)
    with pytest.raises(ValueError, match="are missing"):
        check_tiling(shards[1:])


def test_errors_name_the_tensor_the_replica_and_the_box() -> None:
    def row(i: int, replica: int) -> TensorLayout:
        return TensorLayout.box("layers.0.w", (4, 6), Box((i, 0), (1, 6))).replicated(replica, 2)

    rows = [row(i, replica) for replica in range(2) for i in range(4)]
    check_tiling(rows)
    message = "layers.0.w [4, 6]: elements [2:3, 0:6] are missing in replica 1 of 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_tiling(rows[:6] + rows[7:])
    message = "layers.0.w [4, 6]: elements [3:4, 0:6] are held twice in replica 0 of 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_tiling([*rows, rows[3]])
    message = "layers.0.w [4, 6]: elements [0:4, 0:6] are missing in replica 1 of 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_tiling(rows[:4])


def test_fragments_of_one_name_agree_on_shape_and_replicas() -> None:
    one, other = TensorLayout.whole("w", (4, 6)), TensorLayout.whole("w", (4, 7))
    with pytest.raises(ValueError, match=r"w: global shapes \[4, 6\] and \[4, 7\] differ"):
        check_tiling([one, other])
    with pytest.raises(ValueError, match="w: one fragment has 1 replicas, another 2"):
        check_tiling([one, one.replicated(1, 2)])


def test_tied_copies_are_replicas_and_padding_and_scalars_count() -> None:
    """One table held by two stages, its vocabulary padded on the last rank; a scalar beside it."""
    tables = []
    for stage in range(2):
        first = TensorLayout.box("embedding.weight", (5, 3), Box((0, 0), (3, 3)))
        rest = TensorLayout.box("embedding.weight", (5, 3), Box((3, 0), (2, 3)))
        last = TensorLayout.concat([rest, TensorLayout.padding((1, 3))])
        tables += [first.replicated(stage, 2), last.replicated(stage, 2)]
    check_tiling([*tables, TensorLayout.whole("scale", ()), TensorLayout.whole("none", (0, 4))])
    with pytest.raises(ValueError, match=r"embedding.weight \[5, 3\]: .*\[3:5, 0:3\] are missing"):
        check_tiling(tables[:3])
    with pytest.raises(ValueError, match=r"scale \[\]: elements \[\] are held twice"):
        check_tiling([TensorLayout.whole("scale", ())] * 2)


def test_ten_thousand_fragments_of_one_tensor_take_about_a_second() -> None:
    whole = TensorLayout.whole("w", (5000, 100))
    staggered = [
        TensorLayout.box("s", (5000, 100), Box((a, column), (b - a, 1)))
        for column in range(100)
        for a, b in itertools.pairwise([0, *range(column + 1, column + 4951, 50), 5000])
    ]
    shards = [whole.flat_range(50 * i, 50 * (i + 1)) for i in range(10_000)]
    assert len(staggered) == 10_000
    start = time.process_time()
    check_tiling([*shards, *staggered])
    with pytest.raises(ValueError, match=r"w .* are missing"):
        check_tiling([*shards[:7000], *shards[7001:]])
    with pytest.raises(ValueError, match=r"s .* are held twice"):
        check_tiling([*staggered, staggered[5000]])
    assert time.process_time() - start < 5  # about 0.5 s

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.layout import Box
from mcore_parallel.layout.box import interval_boxes, row_major_strides


def points(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    start = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    return Box(start, tuple(draw(st.integers(0, 4)) for _ in range(dims)))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    return draw(boxes(dims)), draw(boxes(dims))


@settings(max_examples=150, deadline=None)
@given(box_pairs())
def test_intersection_and_difference_are_those_of_the_sets_of_points(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = a.intersect(b)
    assert set(points(both) if both else []) == set(points(a)) & set(points(b))
    rest = Counter(point for piece in a.subtract(b) for point in points(piece))
    assert set(rest) == set(points(a)) - set(points(b))
    assert all(count == 1 for count in rest.values())
    assert len(a.subtract(b)) <= max(1, 2 * len(a.shape))
    assert a.contains(b) == (set(points(b)) <= set(points(a))) or not b.numel


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_interval_boxes_hold_the_points_of_the_interval_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    weights = [data.draw(st.integers(0, 12)) for _ in shape]
    low = data.draw(st.integers(-3, 60))
    high = low + data.draw(st.integers(0, 40))
    found = Counter(
        point for box in interval_boxes(shape, weights, low, high) for point in points(box)
    )
    expected = {
        point
        for point in itertools.product(*map(range, shape))
        if low <= sum(x * w for x, w in zip(point, weights, strict=True)) < high
    }
    assert set(found) == expected
    assert all(count == 1 for count in found.values())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_row_major_range_needs_few_boxes(shape: list[int], data: st.DataObject) -> None:
    strides = row_major_strides(shape)
    numel = strides[0] * shape[0]
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    assert len(list(interval_boxes(shape, strides, low, high))) <= 2 * len(shape) - 1


def test_a_box_refuses_negative_numbers_and_reads_well() -> None:
    assert str(Box((128, 0), (64, 256))) == "[128:192, 0:256]"
    with pytest.raises(ValueError, match=r"start \(-1,\) and shape \(2,\) must not be negative"):
        Box((-1,), (2,))
    with pytest.raises(ValueError, match="differ in length"):
        Box((0, 0), (2,))

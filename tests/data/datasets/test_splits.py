from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data import document_ranges, parse_split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("969,30,1", (0.969, 0.030, 0.001)),
        ("99,1", (0.99, 0.01, 0.0)),
        ("1", (1.0, 0.0, 0.0)),
        (" 0.5, 0.25 ,.25", (0.5, 0.25, 0.25)),
        ("0,0,7", (0.0, 0.0, 1.0)),
        ("1e2,1E2", (0.5, 0.5, 0.0)),
    ],
)
def test_good_splits(text, expected):
    """U11: weights are normalised, missing ones are 0."""
    assert parse_split(text) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("-1,1,0", "training weight '-1'"),
        ("90,abc5,5", "validation weight 'abc5'"),
        ("0,0,0", "sum to 0"),
        ("nan,1,1", "training weight 'nan'"),
        ("1,1,inf", "test weight 'inf'"),
        ("1e308,1e308", "sum to inf"),
        ("1,1,1,1", "4 weights, at most 3"),
        ("", "training weight ''"),
        ("90,,10", "validation weight ''"),
        ("9_0,10", "training weight '9_0'"),
        ("90 10", "training weight '90 10'"),
        ("90/10", "training weight '90/10'"),
    ],
)
def test_bad_splits(text, named):
    """U11: nothing that is not a list of finite weights is taken for one."""
    with pytest.raises(ValueError, match=named) as caught:
        parse_split(text)
    assert "\n" not in str(caught.value)


@given(
    weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(lambda w: sum(w) > 0),
    num=st.integers(0, 10**9),
)
def test_ranges_tile_the_documents(weights, num):
    text = ",".join(map(repr, weights))
    ranges = document_ranges(text, num)
    assert ranges[0].start == 0
    assert ranges[-1].stop == num
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    for part, fraction in zip(ranges, parse_split(text), strict=True):
        assert abs(len(part) - fraction * num) <= 1 + 1e-6 * num


def test_known_ranges():
    assert document_ranges("969,30,1", 1000) == (range(969), range(969, 999), range(999, 1000))
    assert document_ranges((0.5, 0.5, 0.0), 3) == (range(2), range(2, 3), range(3, 3))

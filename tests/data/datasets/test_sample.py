import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data import segment_bounds, segment_positions

E = 0


@pytest.mark.parametrize(
    ("tokens", "positions", "bounds"),
    [
        ([1, 2, E, 3, 4, E], [0, 1, 2, 0, 1, 2], [0, 3, 6]),
        ([1, E, E, 2], [0, 1, 0, 0], [0, 2, 3, 4]),
        ([E], [0], [0, 1]),
        ([E, E, E], [0, 0, 0], [0, 1, 2, 3]),
        ([1, 2], [0, 1], [0, 2]),
        ([E, 5, 6], [0, 0, 1], [0, 1, 3]),
    ],
)
def test_known_boundaries(tokens, positions, bounds):
    """U13: a document owns its EOD, and an EOD at the end opens nothing."""
    cu_seqlens = segment_bounds(np.array(tokens), E)
    assert cu_seqlens.dtype == np.int32
    assert cu_seqlens.tolist() == bounds
    assert segment_positions(cu_seqlens).tolist() == positions


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), padding=st.integers(0, 5))
def test_boundaries_follow_every_eod(tokens, padding):
    """U13, any arrangement of EODs, and padding that looks like one (U12)."""
    filled = np.array(tokens + [E] * padding)
    bounds = segment_bounds(np.array(tokens), E, len(filled))
    expected, position = [], 0
    for i in range(len(filled)):
        expected.append(position)
        genuine_end = i < len(tokens) and filled[i] == E
        position = 0 if genuine_end else position + 1
    assert segment_positions(bounds).tolist() == expected
    assert (np.diff(bounds) > 0).all()
    assert (bounds[0], bounds[-1]) == (0, len(filled))

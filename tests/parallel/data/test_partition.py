from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.data import flat, whole

sizes = st.lists(st.integers(0, 3000), min_size=1, max_size=30)
shards = st.integers(1, 9)
few = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("partition", [flat, whole])
@few
@given(sizes=sizes, shards=shards)
def test_tensors_lie_apart_inside_the_bucket_and_start_aligned(partition, sizes, shards):
    placement = partition(sizes, shards)
    spans = sorted((a, a + n) for a, n in zip(placement.offsets, sizes, strict=True) if n)
    assert all(a % 64 == 0 for a in placement.offsets)
    assert placement.shard_numel % 64 == 0
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert not spans or spans[-1][1] <= shards * placement.shard_numel


@few
@given(sizes=sizes, shards=shards)
def test_flat_slices_are_as_small_as_alignment_allows(sizes, shards):
    placement = flat(sizes, shards)
    total = sum(-(-n // 64) * 64 for n in sizes)
    assert shards * placement.shard_numel < total + 64 * shards
    assert list(placement.offsets) == sorted(placement.offsets)
    assert not placement.keeps_shape


@few
@given(sizes=sizes, shards=shards)
def test_whole_cuts_no_tensor_and_balances(sizes, shards):
    placement = whole(sizes, shards)
    assert placement.keeps_shape
    for start, size in zip(placement.offsets, sizes, strict=True):
        if size:
            first, last = (
                start // placement.shard_numel,
                (start + size - 1) // placement.shard_numel,
            )
            assert first == last
    aligned = [-(-n // 64) * 64 for n in sizes]
    # Largest first into the emptiest: no shard exceeds the mean by more than the largest tensor.
    assert placement.shard_numel <= sum(aligned) / shards + max(aligned)


def test_whole_of_equal_tensors_is_exact():
    placement = whole([128] * 6, 3)
    assert placement.shard_numel == 256
    assert sorted(placement.offsets) == [0, 128, 256, 384, 512, 640]


def test_more_shards_than_elements():
    placement = flat([3], 4)
    assert (placement.offsets, placement.shard_numel) == ((0,), 64)

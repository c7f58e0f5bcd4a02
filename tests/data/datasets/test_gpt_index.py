import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import build_gpt_index
from mcore_data.datasets import compiled, gpt_index


def slow_samples(lengths, order, seq_length, extra, drop_last):
    """The cuts, found by walking token by token."""
    stream = [(i, t) for i, document in enumerate(order) for t in range(lengths[document])]
    starts = [[0, 0]]
    at = 0
    while at + seq_length + extra <= len(stream):
        at += seq_length
        if extra:
            starts.append(list(stream[at]))
        else:
            document, token = stream[at - 1]
            starts.append([document, token + 1])
    if not drop_last and at < len(stream) - extra:
        document, token = stream[-1]
        starts.append([document, token + 1 - extra])
    return starts


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    seq_length=st.integers(1, 20),
    num_samples=st.integers(1, 30),
    extra=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_samples_cut_the_stream(lengths, seq_length, num_samples, extra, drop_last, seed):
    index = build_gpt_index(
        np.array(lengths, np.int32),
        np.arange(len(lengths)),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
        extra_token=extra,
        drop_last=drop_last,
    )
    epochs = -(-(num_samples * seq_length + extra) // sum(lengths))
    assert np.bincount(index.documents, minlength=len(lengths)).tolist() == [epochs] * len(lengths)
    slow = slow_samples(lengths, index.documents.tolist(), seq_length, extra, drop_last)
    assert index.samples.tolist() == slow
    assert len(index.shuffle) >= num_samples
    assert sorted(index.shuffle.tolist()) == list(range(len(slow) - 1))
    assert (index.documents.dtype, index.shuffle.dtype) == (np.int32, np.uint32)


def _interpreted():
    return compiled._Loops(swap=compiled._swap, starts=compiled._starts, blend=compiled._blend)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(lambda x: sum(x) > 1),
    seq_length=st.integers(1, 20),
    num_samples=st.integers(1, 60),
    extra=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_way_of_building_is_the_same(
    lengths, seq_length, num_samples, extra, drop_last, seed
):
    """One array at a time, in blocks, and by the loops that numba compiles, here uncompiled."""

    def build():
        index = build_gpt_index(
            np.array(lengths, np.int32),
            np.arange(len(lengths)),
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
            extra_token=extra,
            drop_last=drop_last,
        )
        parts = (index.documents, index.samples, index.shuffle)
        return [(part.dtype, part.tolist()) for part in parts]

    whole = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_index, "_BLOCK", 3)
        assert build() == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORTH_COMPILING", 0)
        patch.setattr(compiled, "_LENGTHS", 3)
        patch.setattr(compiled, "_DRAWS", 5)
        patch.setattr(compiled, "_loops", _interpreted)
        patch.setattr(compiled, "available", lambda: True)
        assert build() == whole


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("NIGHTLY"), reason="compiling takes seconds (NIGHTLY)")
@pytest.mark.skipif(not compiled.available(), reason="numba is not installed")
def test_compiled_loops(monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 300, 20_000).astype(np.int32)

    def build(**options):
        index = build_gpt_index(
            lengths, np.arange(5, 20_000), seq_length=64, num_samples=100_000, seed=3, **options
        )
        return index.documents, index.samples, index.shuffle

    cases = [{}, {"extra_token": False, "drop_last": False}]
    plain = [build(**options) for options in cases]
    monkeypatch.setattr(compiled, "WORTH_COMPILING", 0)
    for options, expected in zip(cases, plain, strict=True):
        for ours, theirs in zip(build(**options), expected, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)


def test_a_small_last_epoch_comes_last():
    lengths = np.full(50, 10, np.int32)  # 500 tokens and 49 samples an epoch

    def build(num_samples):
        return build_gpt_index(
            lengths, np.arange(50), seq_length=10, num_samples=num_samples, seed=3
        )

    apart = build(49 + 10)
    assert sorted(apart.documents[:50].tolist()) == list(range(50))
    assert sorted(apart.shuffle[:49].tolist()) == list(range(49))
    mixed = build(49 + 45)
    assert sorted(mixed.documents[:50].tolist()) != list(range(50))
    assert sorted(mixed.shuffle[:49].tolist()) != list(range(49))


def test_order_is_frozen():
    """Runs are resumed by sample number: the order for a seed may never change."""
    index = build_gpt_index(
        np.array([4, 1, 7, 3], np.int32),
        np.array([0, 2, 3]),
        seq_length=4,
        num_samples=5,
        seed=1234,
    )
    assert index.documents.tolist() == [3, 2, 3, 0, 2, 0]
    assert index.samples.tolist() == [[0, 0], [1, 1], [1, 5], [2, 2], [3, 3], [4, 3], [5, 0]]
    assert index.shuffle.tolist() == [0, 4, 3, 2, 5, 1]


def test_one_epoch_and_too_little_text():
    lengths = np.array([5, 4], np.int32)
    index = build_gpt_index(lengths, np.arange(2), seq_length=4, num_samples=None, seed=0)
    assert len(index.shuffle) == 2
    with pytest.raises(
        ValueError, match=r"2 documents with 9 tokens hold no sample of seq_length 9, .* takes 10"
    ):
        build_gpt_index(lengths, np.arange(2), seq_length=9, num_samples=None, seed=0)
    with pytest.raises(ValueError, match="0 documents with 0 tokens"):
        build_gpt_index(lengths, np.arange(0), seq_length=9, num_samples=5, seed=0)
    with pytest.raises(ValueError, match="num_samples 0 must be at least 1"):
        build_gpt_index(lengths, np.arange(2), seq_length=9, num_samples=0, seed=0)
    repeated = build_gpt_index(lengths, np.arange(2), seq_length=9, num_samples=3, seed=0)
    assert len(repeated.shuffle) == 3

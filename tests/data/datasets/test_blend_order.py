import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import blend_index, counted_blend_index, scheduled_blend_index
from mcore_data.datasets import blend_order as module
from mcore_data.datasets import compiled

WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=7).filter(lambda w: sum(w) > 1e-3)


def draw(index):
    return index.sources.tolist(), index.samples.tolist()


@pytest.mark.parametrize(
    ("index", "sources"),
    [
        (blend_index([0.3, 0.7], 10), [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]),
        (blend_index([2, 5, 3, 10], 16), [3, 1, 2, 3, 0, 3, 1, 3, 2, 3, 1, 3, 0, 3, 1, 3]),
        (counted_blend_index([2, 5, 1, 4]), [1, 3, 0, 1, 2, 3, 1, 3, 1, 0, 3, 1]),
        (counted_blend_index([3, 3]), [0, 1, 0, 1, 0, 1]),
    ],
)
def test_order_is_that_of_megatron(index, sources):
    """Recorded from megatron-core 0.16.1; the order for given weights may never change."""
    seen = dict.fromkeys(sources, 0)
    samples = []
    for source in sources:
        samples.append(seen[source])
        seen[source] += 1
    assert draw(index) == (sources, samples)
    assert (index.sources.dtype, index.samples.dtype) == (np.int16, np.int64)


def test_reported_mixes():
    """U10 as reported: exact shares, and sources that are never drawn."""
    assert blend_index([0.3, 0.7], 10).counts(2).tolist() == [3, 7]
    for num in (10, 100, 1000):
        assert blend_index([0.001, 0.999], num).counts(2).tolist() == [1, num - 1]
    never = blend_index([0.01, 0.01, 0.01, 0.97], 5)
    assert never.counts(4).tolist() == [1, 0, 0, 4]


@given(weights=WEIGHTS, num=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_no_source_leads_its_share_by_a_whole_sample(weights, num):
    """U10: count - w * n < 1 at every prefix; weight 0 is never drawn; samples are 0, 1, 2, ..."""
    index = blend_index(weights, num)
    normal = np.array(weights) / np.sum(weights)
    counts = np.zeros(len(weights), int)
    for n, (source, sample) in enumerate(zip(*draw(index), strict=True), 1):
        assert sample == counts[source]
        assert weights[source] > 0
        counts[source] += 1
        assert (counts - normal * n < 1 + 1e-9).all()
    assert counts.tolist() == index.counts(len(weights)).tolist()


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
@settings(max_examples=40, deadline=None)
def test_counts_are_taken_exactly(counts):
    index = counted_blend_index(counts)
    assert index.counts(len(counts)).tolist() == counts
    for source, count in enumerate(counts):
        assert index.samples[index.sources == source].tolist() == list(range(count))


@given(
    phases=st.lists(
        st.tuples(st.lists(st.floats(0.1, 1), min_size=3, max_size=3), st.integers(0, 40)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=40, deadline=None)
def test_changed_weights_neither_repeat_nor_lose_a_sample(phases):
    index = scheduled_blend_index(phases)
    for source in range(3):
        drawn = index.samples[index.sources == source]
        assert drawn.tolist() == list(range(len(drawn)))
    start = 0
    for weights, num in phases:
        expected = blend_index(weights, num).sources
        assert index.sources[start : start + num].tolist() == expected.tolist()
        start += num
    # What is consumed already does not depend on what follows.
    head = scheduled_blend_index(phases[:1])
    assert draw(head) == tuple(part[: len(head)] for part in draw(index))


def variants():
    loops = compiled._Loops(swap=compiled._swap, starts=compiled._starts, blend=compiled._blend)
    yield pytest.param(lambda: loops, id="interpreted")
    wanted = os.environ.get("NIGHTLY") and compiled.available()
    mark = pytest.mark.skipif(
        not wanted, reason="needs numba, and NIGHTLY: compiling takes seconds"
    )
    yield pytest.param(None, id="numba", marks=[mark, pytest.mark.slow])


@pytest.mark.parametrize("loops", list(variants()))
def test_every_way_of_drawing_is_the_same(loops, monkeypatch):
    if loops:
        monkeypatch.setattr(compiled, "_loops", loops)
    rng = np.random.default_rng(0)
    for trial in range(30):
        num_sources = int(rng.integers(1, 9))
        weights = rng.random(num_sources) ** 3 + 1e-9
        limits = np.full(num_sources, -1)
        num = int(rng.integers(0, 300))
        if trial % 2:
            limits = rng.integers(0, 40, num_sources)
            limits[0] += 1
            weights, num = limits / limits.sum(), int(limits.sum())
        drawn = []
        for function in (module._draw_few, module._draw, compiled.blend):
            with monkeypatch.context() as patch:
                patch.setattr(module, "_FEW", 0)
                sources, samples = np.empty(num, np.int16), np.empty(num, np.int64)
                function(weights, limits, np.zeros(num_sources, int), sources, samples)
            drawn.append((sources.tolist(), samples.tolist()))
            cut = num // 3  # the rest goes on from what the first third has drawn
            counts = np.bincount(sources[:cut], minlength=num_sources)
            rest = np.empty(num - cut, np.int16), np.empty(num - cut, np.int64)
            function(weights, limits, counts, *rest)
            drawn.append((sources[:cut].tolist() + rest[0].tolist(), samples.tolist()))
            assert rest[1].tolist() == samples[cut:].tolist()
        assert all(one == drawn[0] for one in drawn)


def test_many_sources():
    index = blend_index([1.0] * 40_000, 10)
    assert index.sources.dtype == np.int32
    assert index.sources.tolist() == list(range(10))


def test_bad_arguments():
    for call, message in (
        (lambda: blend_index([1, -2], 3), "weight 1 of the blend is -2.0"),
        (lambda: blend_index([float("nan")], 3), "weight 0 of the blend is nan"),
        (lambda: blend_index([0, 0], 3), "the 2 weights of the blend sum to 0.0"),
        (lambda: blend_index([1], -1), "num_samples -1 must be at least 0"),
        (lambda: counted_blend_index([0, 0]), r"counts \[0, 0\] of the blend"),
        (lambda: counted_blend_index([]), r"counts \[\] of the blend"),
        (lambda: scheduled_blend_index([]), "at least one phase"),
        (
            lambda: scheduled_blend_index([([1, 2], 3), ([1], 3)]),
            "phase 1 of the blend has 1 weights, phase 0 has 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert list(itertools.chain(*draw(blend_index([1], 0)))) == []

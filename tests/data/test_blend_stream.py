import json

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mcore_data import (
    BatchRamp,
    BatchSampler,
    BlendLoader,
    BlendSampler,
    JoinedDataset,
    Sample,
    WeightSchedule,
    blend_stream,
    scheduled_blend_index,
)


class Numbers:
    """Sample i: two tokens, the number of the source and i."""

    def __init__(self, source, num):
        self.source = source
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        assert 0 <= index < self.num
        return Sample(
            tokens=np.array([self.source, index]),
            labels=np.zeros(2, np.int64),
            loss_mask=np.ones(2, np.float32),
            positions=np.arange(2),
            cu_seqlens=np.array([0, 2], np.int32),
        )


def pairs(steps):
    """The (source, sample) of every row of the steps, in order over the ranks."""
    return [tuple(row) for parts in steps for batch in parts for row in batch["tokens"].tolist()]


def expected(lengths, phases, seed, shuffle):
    """The stream by its definition: the blend's order, each source epoch by epoch."""
    index = scheduled_blend_index(phases)
    names = [f"s{k}" for k in range(len(lengths))]
    streams = []
    for name, length, count in zip(names, lengths, index.counts(len(lengths)), strict=True):
        seed_of = blend_stream._seed_of(seed, name)
        streams.append(BatchSampler(max(length, 1), 1, seed_of, shuffle).take(0, int(count)))
    order = zip(index.sources.tolist(), index.samples.tolist(), strict=True)
    return [(k, int(streams[k][i])) for k, i in order]


@st.composite
def runs(draw):
    """Lengths of sources, and legs of a run: weights, ranks, micro-batch, steps, read-ahead."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    weights = st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))
    leg = st.tuples(
        weights.filter(any),
        st.sampled_from([(1, 1), (1, 6), (2, 3), (3, 2), (6, 1)]),
        st.integers(0, 3),
        st.integers(0, 2),
    )
    return lengths, draw(st.lists(leg, min_size=1, max_size=5)), draw(st.booleans())


# Weights that change and change back before a sample is drawn: the phase goes on.
CHANGED_BACK = [([1, 2], (1, 1), 1, 0), ([0, 1], (1, 1), 0, 0), ([1, 2], (1, 1), 1, 0)]


@given(run=runs(), block=st.sampled_from([1, 5, 50]))
@example(run=([1, 1], CHANGED_BACK, False), block=1)
@settings(max_examples=25, deadline=None)
def test_stops_ranks_and_weights_lose_and_repeat_nothing(run, block):
    """U10, U17 and U19: stop anywhere, go on with other ranks, other weights: one stream."""
    lengths, legs, shuffle = run
    dataset = JoinedDataset([Numbers(k, num) for k, num in enumerate(lengths)])
    named = {f"s{k}": num for k, num in enumerate(lengths)}
    state, seen, phases = None, [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_stream, "_BLOCK", block)
        for weights, (size, micro), steps, prefetch in legs:
            ranks = [
                BlendLoader(
                    dataset,
                    BlendSampler(named, weights, 6, 5, shuffle=shuffle),
                    dp_rank=rank,
                    dp_size=size,
                    micro_batch_size=micro,
                    prefetch=prefetch,
                )
                for rank in range(size)
            ]
            for rank in ranks:
                if state is not None:
                    rank.load_state_dict(json.loads(json.dumps(state)))
            for _ in range(steps):
                parts = [next(rank) for rank in ranks]
                rows = range(len(parts[0]))
                seen += pairs([[part[row] for row in rows for part in parts]])
            states = [rank.state_dict() for rank in ranks]
            for rank in ranks:
                rank.close()
            assert all(s == states[0] for s in states)
            state = states[0]
            total = sum(weights)
            share = [w / total for w in weights]
            if phases and phases[-1][2] == share:
                phases[-1][1] += 6 * steps
            elif steps:
                phases.append([weights, 6 * steps, share])
            drawn = [sum(k == source for source, _ in seen) for k in range(len(lengths))]
            assert [row["consumed"] for row in state["sources"].values()] == drawn
            assert state["consumed_samples"] == len(seen)
    if phases:
        assert seen == expected(lengths, [phase[:2] for phase in phases], 5, shuffle)
    for k, length in enumerate(lengths):  # whole epochs of every source
        mine = [sample for source, sample in seen if source == k]
        for start in range(0, len(mine) - length + 1, length):
            assert sorted(mine[start : start + length]) == list(range(length))


@given(starts=st.lists(st.integers(1, 40), max_size=4, unique=True), cut=st.integers(0, 60))
@example(starts=[7], cut=7)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_schedule_of_weights_is_the_same_with_stops(monkeypatch, starts, cut):
    starts = [0, *sorted(starts)]
    weights = [((i * 7) % 5, (i * 3) % 4, 1) for i in range(len(starts))]
    schedule = WeightSchedule(starts=tuple(starts), weights=tuple(weights))
    lengths = {"s0": 4, "s1": 7, "s2": 5}
    monkeypatch.setattr(blend_stream, "_BLOCK", 16)
    whole = BlendSampler(lengths, schedule, 1, 3)
    ends = [*starts[1:], 80]
    phases = [(w, end - start) for w, start, end in zip(weights, starts, ends, strict=True)]
    ids = [{"s0": 0, "s1": 4, "s2": 11}[f"s{k}"] + i for k, i in expected([4, 7, 5], phases, 3, 1)]
    assert whole.take(0, 80).tolist() == ids
    fresh = BlendSampler(lengths, schedule, 1, 3)
    other = fresh.resumed(whole.state(), whole.progress(cut), cut)
    assert other.progress(cut) == whole.progress(cut)
    assert other.take(cut, 80 - cut).tolist() == ids[cut:]
    assert other.progress(70) == whole.progress(70)
    assert sum(whole.counts(cut).values()) == cut


def test_sources_come_and_go():
    old = BlendSampler({"a": 5, "b": 6}, [1, 0], 2, 1)
    new = BlendSampler({"b": 8, "c": 3, "a": 5}, [1, 1, 2], 2, 1)
    resumed = new.resumed(old.state(), old.progress(4), 4)
    assert resumed.counts(8) == {"b": 1, "c": 1, "a": 6}
    # A source that had a weight is gone, and nothing drawn since: a new phase, now or later.
    less = BlendSampler({"a": 5, "c": 3}, [1, 2], 2, 1)
    begun = BlendSampler({"a": 5, "b": 6}, [9, 1], 2, 1)
    gone = less.resumed(begun.state(), begun.progress(1), 1)
    again = less.resumed(gone.state(), gone.progress(1), 1)
    assert gone.progress(1)["a"] == begun.progress(1)["a"]
    assert [gone.counts(n)["c"] for n in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert gone.take(1, 9).tolist() == again.take(1, 9).tolist()
    # The samples of `a` go on where they were: four of the first epoch have been shown.
    shown = [i for i in resumed.take(4, 4).tolist() if i >= 11]
    assert [i - 11 for i in shown] == old.take(4, 2).tolist()
    for sources, message in (
        ({"b": 6}, "4 samples were drawn from a, which had 5: it is gone: keep it, with weight 0"),
        ({"a": 4, "b": 6}, "4 samples were drawn from a, which had 5: it has 4 now"),
    ):
        other = BlendSampler(sources, [1] * len(sources), 2, 1)
        with pytest.raises(ValueError, match=message):
            other.resumed(old.state(), old.progress(4), 4)
    for state in (BatchSampler(5, 2).state(), BlendSampler({"a": 5}, [1], 2, 9).state()):
        with pytest.raises(ValueError, match="the state is of a stream with"):
            old.resumed(state, {}, 4)
    with pytest.raises(ValueError, match="resumed at 4 samples, 2 lie before"):
        resumed.take(2, 2)


def test_a_source_keeps_its_order_when_its_name_grows_or_shrinks():
    """A blend calls its files by their paths as soon as two of them have the same last part."""
    short = {"code": 11, "web": 9}
    long = {"/data/code": 11, "/data/web": 9}
    old = BlendSampler(short, [1, 2], 3, seed=4)
    more = BlendSampler({**long, "/other/code": 5}, [1, 2, 0], 3, seed=4)
    resumed = more.resumed(old.state(), old.progress(6), 6)
    assert resumed.take(6, 60).tolist() == old.take(6, 60).tolist()
    assert resumed.counts(9) == {**old.counts(9), "/other/code": 0}
    again = more.resumed(resumed.state(), resumed.progress(12), 12)
    assert again.take(12, 30).tolist() == old.take(12, 30).tolist()
    grown = BlendSampler(long, [1, 2], 3, seed=4)
    back = old.resumed(grown.state(), grown.progress(6), 6)
    assert back.take(6, 60).tolist() == grown.take(6, 60).tolist()
    twins = BlendSampler({"/data/code": 11, "/other/code": 11, "web": 9}, [1, 1, 1], 3, seed=4)
    with pytest.raises(ValueError, match="code of the state may be any of several files of 11"):
        twins.resumed(old.state(), old.progress(6), 6)


def test_a_batch_grows_and_every_sample_comes_in_turn():
    ramp = BatchRamp(start=2, increment=2, samples=8)
    sampler = BlendSampler({"a": 50, "b": 70}, [3, 1], 6, shuffle=False, ramp=ramp)
    assert list(sampler.sizes()) == [2, 4, 6]
    consumed, ids = 0, []
    while consumed < 40:
        batch = sampler.batch(consumed).tolist()
        assert len(batch) == sampler.size(consumed)
        ids, consumed = ids + batch, sampler.after(consumed)
    assert [i for i in ids if i < 50] == list(range(sampler.counts(consumed)["a"]))
    assert [i - 50 for i in ids if i >= 50] == list(range(sampler.counts(consumed)["b"]))
    assert sampler.counts(40) == {"a": 30, "b": 10}


def test_a_schedule_file(tmp_path):
    path = tmp_path / "weights.json"
    rows = [
        {"samples": 0, "weights": {"web": 3, "code": 1}},
        {"samples": 10, "weights": {"code": 2}},
    ]
    path.write_text(json.dumps(rows))
    schedule = WeightSchedule.read(path, ["code", "web"])
    assert schedule == WeightSchedule(starts=(0, 10), weights=((0.25, 0.75), (1.0, 0.0)))
    assert [schedule.at(n) for n in (0, 9, 10)] == [(0.25, 0.75), (0.25, 0.75), (1.0, 0.0)]
    for content, message in (
        ("{", "no JSON"),
        ("[]", "it must hold a list of phases"),
        ('[{"samples": 0}]', "phase 0: an object with samples and weights"),
        ('[{"samples": "0", "weights": {}}]', "phase 0: samples is a number"),
        ('[{"samples": 0, "weights": {"cod": 1}}]', "phase 0: no source is 'cod', there are"),
        ('[{"samples": 0, "weights": {"code": "1"}}]', "phase 0: weights .* must be numbers"),
        ('[{"samples": 5, "weights": {"code": 1}}]', "the first must start at 0 samples"),
        ('[{"samples": 0, "weights": {}}]', "the 2 weights of the blend sum to 0.0"),
        (json.dumps([rows[0], rows[0]]), "a phase starts at 0 samples, after one at 0"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"weights.json: .*{message}"):
            WeightSchedule.read(path, ["code", "web"])


def test_bad_arguments():
    with pytest.raises(ValueError, match="2 weights for 1 sources"):
        BlendSampler({"a": 5}, [1, 2], 2)
    with pytest.raises(ValueError, match="source b has no samples"):
        BlendSampler({"a": 5, "b": 0}, [1, 2], 2)
    assert BlendSampler({"a": 5, "b": 0}, [1, 0], 2).num_samples == 5
    with pytest.raises(ValueError, match="1 weights from 5 samples on, 2 from the first"):
        WeightSchedule(starts=(0, 5), weights=((1, 2), (1,)))
    joined = JoinedDataset([Numbers(0, 2), Numbers(1, 0), Numbers(2, 3)])
    assert [joined[i].tokens.tolist() for i in (1, 2, 4)] == [[0, 1], [2, 0], [2, 2]]
    with pytest.raises(IndexError, match="sample 5 of 5"):
        joined[5]

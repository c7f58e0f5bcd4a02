import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import (
    BatchRamp,
    BatchSampler,
    MicroBatchLoader,
    Sample,
    ValidationLoader,
)


class Numbers:
    """Sample i: every token is i, i % 4 + 1 of 4 labels count, a boundary at i % 3."""

    def __init__(self, num):
        self.num = num
        self.read = []

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        self.read.append(index)
        cut = index % 3
        bounds = [0, cut, 4] if cut else [0, 4]
        return Sample(
            tokens=np.full(4, index),
            labels=np.full(4, index + 1),
            loss_mask=(np.arange(4) <= index % 4).astype(np.float32),
            positions=np.arange(4),
            cu_seqlens=np.array(bounds, np.int32),
        )


class Broken(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("disk is gone")
        return super().__getitem__(index)


def loader(dataset, batch, *, rank=0, size=1, micro=1, shuffle=False, **options):
    sampler = BatchSampler(len(dataset), batch, seed=3, shuffle=shuffle)
    return MicroBatchLoader(
        dataset, sampler, dp_rank=rank, dp_size=size, micro_batch_size=micro, **options
    )


def ids(steps):
    return [[part["sample_ids"].tolist() for part in step] for step in steps]


def test_what_a_micro_batch_holds():
    with loader(Numbers(10), 4, rank=1, size=2, micro=2) as batches:
        (batch,) = next(batches)
    assert batch["sample_ids"].tolist() == [2, 3]
    assert batch["tokens"].tolist() == [[2] * 4, [3] * 4]
    assert batch["labels"].tolist() == [[3] * 4, [4] * 4]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 8]
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "positions": "int64",
        "cu_seqlens": "int32",
        "sample_ids": "int64",
    }


def test_ranks_share_each_micro_batch():
    steps = [ids([next(loader(Numbers(20), 8, rank=r, size=2, micro=2))])[0] for r in range(2)]
    assert steps == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@given(
    num=st.integers(1, 30),
    shuffle=st.booleans(),
    legs=st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1), (6, 2)]),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
)
@settings(max_examples=25, deadline=None)
def test_any_stops_and_rank_counts_give_the_uninterrupted_run(num, shuffle, legs):
    """U17 and U19: stop anywhere, resume with other ranks and micro-batches: the same steps."""
    dataset = Numbers(num)
    expected = BatchSampler(num, 12, seed=3, shuffle=shuffle)
    state, step = None, 0
    for (size, micro), steps, prefetch in legs:
        ranks = [
            loader(dataset, 12, rank=r, size=size, micro=micro, shuffle=shuffle, prefetch=prefetch)
            for r in range(size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(steps):
            parts = [next(rank) for rank in ranks]
            seen = np.concatenate([p[k]["sample_ids"] for k in range(len(parts[0])) for p in parts])
            assert seen.tolist() == expected.batch(12 * step).tolist()
            step += 1
        states = [rank.state_dict() for rank in ranks]
        for rank in ranks:
            rank.close()
        assert all(s == states[0] for s in states)
        state = states[0]
        assert state["consumed_samples"] == 12 * step


@given(
    num=st.integers(24, 60),
    last=st.sampled_from(["join", "drop", "pad"]),
    ramp=st.sampled_from([None, BatchRamp(start=12, increment=12, samples=40)]),
    legs=st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)]),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=5,
    ),
)
@settings(max_examples=25, deadline=None)
def test_growing_batches_and_ends_of_epochs_are_resumed_too(num, last, ramp, legs):
    """U19: the same for a batch that grows, and for every way to end an epoch."""
    dataset = Numbers(num)
    sampler = BatchSampler(num, 24, 3, True, last, ramp)
    state, consumed = None, 0
    for (size, micro), steps, prefetch in legs:
        ranks = [
            MicroBatchLoader(
                dataset,
                sampler,
                dp_rank=rank,
                dp_size=size,
                micro_batch_size=micro,
                prefetch=prefetch,
            )
            for rank in range(size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(steps):
            wanted = sampler.batch(consumed)
            assert ranks[0].num_micro_batches == len(wanted) // (size * micro)
            parts = [next(rank) for rank in ranks]
            flat = [p[k] for k in range(len(parts[0])) for p in parts]
            seen = np.concatenate([batch["sample_ids"] for batch in flat])
            assert seen.tolist() == wanted.tolist()
            assert not any(b["loss_mask"][b["sample_ids"] < 0].any() for b in flat)
            consumed = sampler.after(consumed)
        states = [rank.state_dict() for rank in ranks]
        for rank in ranks:
            rank.close()
        assert all(s == states[0] for s in states)
        state = states[0]
        assert state["consumed_samples"] == consumed


def test_every_size_of_a_growing_batch_must_fit_the_ranks():
    sampler = BatchSampler(40, 12, ramp=BatchRamp(start=4, increment=2, samples=9))
    with pytest.raises(ValueError, match=r"batch of 6 samples is no multiple of 4 .* 4 or 8"):
        MicroBatchLoader(Numbers(40), sampler, dp_rank=0, dp_size=2, micro_batch_size=2)


def test_reading_ahead_is_not_consuming():
    dataset = Numbers(100)
    with loader(dataset, 2, prefetch=3) as batches:
        next(batches)
        deadline = time.time() + 10
        while len(dataset.read) < 8 and time.time() < deadline:
            time.sleep(0.005)
        assert batches.consumed == 2
        assert len(dataset.read) == 8  # one step taken, three ahead
        batches.load_state_dict({**batches.state_dict(), "consumed_samples": 50})
        assert ids([next(batches)]) == [[[50], [51]]]
    assert ids([next(loader(dataset, 2, consumed=40, prefetch=0))]) == [[[40], [41]]]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_fault_is_raised_in_its_turn_and_again(prefetch):
    before = threading.active_count()
    batches = loader(Broken(10), 2, micro=2, prefetch=prefetch)
    assert ids([next(batches), next(batches)]) == [[[0, 1]], [[2, 3]]]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"loading samples 4, 5 failed: disk is gone"):
            next(batches)
        assert batches.consumed == 4
    assert threading.active_count() == before


def test_dropping_a_loader_ends_its_thread():
    before = threading.active_count()
    batches = loader(Numbers(10), 2)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_bad_arguments():
    for size, micro, message in (
        (2, 2, r"global batch of 10 samples is no multiple of 4 .* nearest: 8 or 12"),
        (4, 8, r"no multiple of 32 \(micro-batch 8 x 4 ranks\); nearest: 32"),
    ):
        with pytest.raises(ValueError, match=message):
            loader(Numbers(50), 10, size=size, micro=micro)
    with pytest.raises(ValueError, match="dp_rank 2 does not lie in 0 to 1"):
        loader(Numbers(50), 10, rank=2, size=2)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        loader(Numbers(50), 10, micro=0)
    with pytest.raises(ValueError, match="counts 9 samples, the dataset has 50"):
        MicroBatchLoader(Numbers(50), BatchSampler(9, 1), dp_rank=0, dp_size=1, micro_batch_size=1)
    other = loader(Numbers(50), 10, shuffle=True).state_dict()
    with pytest.raises(ValueError, match=r"stream with .*'shuffle': True.*has .*False"):
        loader(Numbers(50), 10).load_state_dict(other)


def validation(dataset, size, micro, num=None):
    return [
        ValidationLoader(dataset, dp_rank=r, dp_size=size, micro_batch_size=micro, num_samples=num)
        for r in range(size)
    ]


@given(num=st.integers(1, 40), size=st.integers(1, 8), micro=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_validation_sees_each_sample_once(num, size, micro):
    """U16: the exact token-weighted mean, the same for any ranks and batch, no rank waiting."""
    dataset = Numbers(num)
    passes = [list(loader) for loader in validation(dataset, size, micro)]
    assert len({len(one) for one in passes}) == 1
    assert len(passes[0]) == len(validation(dataset, size, micro)[0])
    seen, loss, tokens = [], 0.0, 0.0
    for parts in zip(*passes, strict=True):
        assert len({part["tokens"].shape for part in parts}) == 1
        for part in parts:
            assert 1 <= len(part["tokens"]) <= micro
            seen += part["sample_ids"].tolist()
            loss += float((part["labels"] ** 2 * part["loss_mask"]).sum())
            tokens += float(part["loss_mask"].sum())
            assert not part["loss_mask"][part["sample_ids"] < 0].any()
    assert sorted(i for i in seen if i >= 0) == list(range(num))
    assert sum(i < 0 for i in seen) < size
    weights = np.arange(num) % 4 + 1
    assert loss / tokens == ((np.arange(num) + 1) ** 2 * weights).sum() / weights.sum()


def test_three_samples_two_ranks_batch_256():
    """U16 as reported: 3 validation samples, batch 256, 2 ranks."""
    passes = [list(one) for one in validation(Numbers(3), 2, 256)]
    assert [[p["sample_ids"].tolist() for p in one] for one in passes] == [[[0, 1]], [[2, -1]]]
    assert passes[1][0]["loss_mask"][1].tolist() == [0, 0, 0, 0]
    again = validation(Numbers(3), 2, 256)[0]
    assert ids([list(again), list(again)]) == [[[0, 1]]] * 2
    part = validation(Numbers(30), 1, 4, num=6)[0]
    assert [b["sample_ids"].tolist() for b in part] == [[0, 1, 2, 3], [4, 5]]
    for num in (0, 31):
        with pytest.raises(ValueError, match=f"{num} validation samples .* dataset has 30"):
            validation(Numbers(30), 1, 4, num=num)
    with pytest.raises(RuntimeError, match="loading samples 4, 5, 6, 7 failed: disk is gone"):
        list(validation(Broken(10), 1, 4)[0])

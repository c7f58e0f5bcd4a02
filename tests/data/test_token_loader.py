import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import (
    BatchSampler,
    ExternalLoader,
    MicroBatchLoader,
    Sample,
    TokenBatchLoader,
    TokenBatchSampler,
    balance,
    collate_flat,
)


class Texts:
    """Sample i: `lengths[i]` tokens i, the last with loss, cut in two segments where it can be."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths, np.int64)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        size = int(self.lengths[index])
        if index == 7:
            raise OSError("disk is gone")
        return Sample(
            tokens=np.full(size, index),
            labels=np.full(size, index + 1),
            loss_mask=(np.arange(size) == size - 1).astype(np.float32),
            positions=np.arange(size),
            cu_seqlens=np.array([0, 1, size] if size > 1 else [0, 1], np.int32),
        )


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), more=st.integers(0, 20), square=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_goes_to_one_micro_batch_with_room(lengths, num_ranks, more, square):
    capacity = max(lengths) + more
    work = (lambda sizes: sizes**2) if square else None
    shares = balance(lengths, num_ranks=num_ranks, max_tokens=capacity, work=work)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for items in share for i in items) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[i] for i in items) <= capacity for s in shares for items in s)
    assert len(shares[0]) <= max(1, 2 * -(-sum(lengths) // (num_ranks * capacity)))


def test_ranks_have_about_the_same_work():
    rng = np.random.default_rng(0)
    for work in (lambda sizes: sizes, lambda sizes: sizes + sizes**2 / 1000):
        lengths = np.minimum(rng.geometric(1 / 700, 600), 4000)
        shares = balance(lengths, num_ranks=8, max_tokens=16384, work=work)
        loads = np.array([[work(lengths[np.array(m)]).sum() for m in share] for share in shares])
        assert loads.sum(1).max() < 1.02 * loads.sum(1).mean()
        assert (loads.max(0) < 1.15 * loads.mean(0)).all()


@given(
    lengths=LENGTHS,
    tokens=st.integers(1, 30),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_any_stops_and_rank_counts_give_the_uninterrupted_run(lengths, tokens, legs):
    """U17 and U19: a step holds the same samples, whatever the ranks; none is lost or repeated."""
    lengths = lengths[:7]  # sample 7 is broken
    dataset = Texts(lengths)
    order = BatchSampler(len(lengths), 1, 3, True)
    sampler = TokenBatchSampler(dataset.lengths, tokens, seed=3)
    state, consumed = None, 0
    for size, steps in legs:
        ranks = [
            TokenBatchLoader(
                dataset, sampler, dp_rank=rank, dp_size=size, max_tokens=12, prefetch=steps % 2
            )
            for rank in range(size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(steps):
            parts = [next(rank) for rank in ranks]
            assert len({len(part) for part in parts}) == 1
            flat = [batch for part in parts for batch in part]
            ids = [i for batch in flat for i in batch["sample_ids"].tolist() if i >= 0]
            expected = order.take(consumed, len(ids)).tolist()
            assert sorted(ids) == sorted(expected)
            total = sum(lengths[i] for i in expected)
            assert total <= tokens or len(ids) == 1
            following = int(order.take(consumed + len(ids), 1)[0])
            assert total + lengths[following] > tokens
            assert sum(batch["loss_mask"].sum() for batch in flat) == len(ids)
            assert all(len(batch["tokens"]) <= 12 for batch in flat)
            consumed += len(ids)
        states = [rank.state_dict() for rank in ranks]
        for rank in ranks:
            rank.close()
        assert all(s == states[0] for s in states)
        state = states[0]
        assert state["consumed_samples"] == consumed


def test_what_a_flat_micro_batch_holds():
    dataset = Texts([3, 1, 2])
    batch = collate_flat([dataset[2], dataset[1], dataset[0]], [2, 1, 0])
    assert batch["tokens"].tolist() == [2, 2, 1, 0, 0, 0]
    assert batch["positions"].tolist() == [0, 1, 0, 0, 1, 2]
    assert batch["loss_mask"].tolist() == [0, 1, 1, 0, 0, 1]
    assert batch["cu_seqlens"].tolist() == [0, 1, 2, 3, 4, 6]
    assert batch["sample_ids"].tolist() == [2, 1, 0]
    assert batch["cu_seqlens"].dtype == np.int32


def test_a_rank_without_a_sample_gets_one_without_loss():
    dataset = Texts([5, 2])
    sampler = TokenBatchSampler(dataset.lengths, 5, shuffle=False)
    parts = [
        next(TokenBatchLoader(dataset, sampler, dp_rank=r, dp_size=2, max_tokens=5, prefetch=0))
        for r in range(2)
    ]
    assert [part[0]["sample_ids"].tolist() for part in parts] == [[0], [-1]]
    assert parts[1][0]["tokens"].tolist() == [1, 1]
    assert not parts[1][0]["loss_mask"].any()


def test_bad_arguments():
    dataset = Texts([5, 2])
    sampler = TokenBatchSampler(dataset.lengths, 5)
    for options, message in (
        ({"dp_rank": 2}, "dp_rank 2 does not lie in 0 to 1"),
        ({"max_tokens": 4}, "sample 0 has 5 positions, a micro-batch takes 4"),
        ({"dataset": Texts([5])}, "the sampler counts 2 samples of 7 positions, the dataset has 1"),
    ):
        arguments = {"dataset": dataset, "dp_rank": 0, "dp_size": 2, "max_tokens": 9, **options}
        with pytest.raises(ValueError, match=message):
            TokenBatchLoader(arguments.pop("dataset"), sampler, **arguments)
    with pytest.raises(ValueError, match="sample 1 has 9 positions, a micro-batch takes 8"):
        balance([3, 9], num_ranks=1, max_tokens=8)
    for lengths, tokens, message in (
        ([1], 0, "tokens of a step is 0"),
        ([], 5, "0 samples: there must be some"),
        ([1, 0], 5, "2 samples: .* none of them empty"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenBatchSampler(np.array(lengths, np.int64), tokens)
    broken = Texts([1] * 9)
    loader = TokenBatchLoader(
        broken,
        TokenBatchSampler(broken.lengths, 9, shuffle=False),
        dp_rank=0,
        dp_size=1,
        max_tokens=9,
    )
    with pytest.raises(RuntimeError, match=r"loading samples 0, .*, 7, ... failed: disk is gone"):
        next(loader)


def test_steps_from_elsewhere():
    """The function begins where the state was taken; the state is refused under another name."""
    dataset = Texts([3] * 6)

    def steps(consumed):
        with MicroBatchLoader(
            dataset, BatchSampler(6, 2), dp_rank=0, dp_size=1, micro_batch_size=1, consumed=consumed
        ) as inner:
            yield from inner

    loader = ExternalLoader(steps, samples_per_step=2, name="mine")
    first = [next(loader)[0]["sample_ids"].tolist() for _ in range(2)]
    state = loader.state_dict()
    assert (first, state["consumed_samples"]) == ([[0], [2]], 4)
    loader.close()
    again = ExternalLoader(steps, samples_per_step=2, name="mine")
    again.load_state_dict(state)
    assert next(again)[0]["sample_ids"].tolist() == [4]
    again.close()
    message = r"stream with \{'external': 'mine'\}, this loader is 'other'"
    with pytest.raises(ValueError, match=message):
        ExternalLoader(steps, samples_per_step=2, name="other").load_state_dict(state)
    with pytest.raises(ValueError, match="samples_per_step is 0"):
        ExternalLoader(steps, samples_per_step=0)
    good = collate_flat([dataset[0]], [0])
    for change, message in (
        ({"labels": np.zeros(2)}, r"labels has shape \(2,\), tokens have \(3,\)"),
        ({"cu_seqlens": np.array([0, 2])}, "cu_seqlens ends at 2, there are 3 tokens"),
        ({"positions": None}, "it has no positions"),
    ):
        bad = {k: v for k, v in {**good, **change}.items() if v is not None}
        one = ExternalLoader(lambda consumed, bad=bad: iter([[bad]]), samples_per_step=1)
        with pytest.raises(ValueError, match=f"step after 0 samples, micro-batch 0 .*{message}"):
            next(one)
    ended = ExternalLoader(lambda consumed: iter([]), samples_per_step=1)
    with pytest.raises(StopIteration):
        next(ended)

import itertools
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_data import BatchRamp, BatchSampler, BatchSteps, shuffled_order


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_then_whole_epochs(shuffle):
    """U17: 10 samples, batch 2, stop after 3 steps: the rest of the epoch, then all ten."""
    uninterrupted = BatchSampler(10, 2, seed=7, shuffle=shuffle)
    stream = [uninterrupted.batch(2 * step).tolist() for step in range(15)]
    resumed = BatchSampler(10, 2, seed=7, shuffle=shuffle)
    rest = [resumed.batch(2 * step).tolist() for step in range(3, 15)]
    assert rest == stream[3:]
    if not shuffle:
        assert rest[:2] == [[6, 7], [8, 9]]
        assert rest[2:7] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert sorted(chain(*stream[:3], *rest[:2])) == list(range(10))
    for epoch in (rest[2:7], rest[7:12]):
        assert sorted(chain(*epoch)) == list(range(10))
    if shuffle:
        assert rest[2:7] != rest[7:12]


@given(
    num=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=12),
    shuffle=st.booleans(),
    seed=st.integers(-(2**70), 2**70),
)
@settings(deadline=None)
def test_any_cut_gives_the_same_stream(num, sizes, shuffle, seed):
    """U17, and its kind: batches of any sizes are stretches of one stream of whole epochs."""
    whole = BatchSampler(num, 1, seed, shuffle).take(0, sum(sizes) + num)
    consumed = 0
    for size in sizes:
        batch = BatchSampler(num, size, seed, shuffle).batch(consumed)
        assert batch.tolist() == whole[consumed : consumed + size].tolist()
        consumed += size
    for start in range(0, len(whole) - num + 1, num):
        assert sorted(whole[start : start + num].tolist()) == list(range(num))


def batches(sampler, count):
    consumed, out = 0, []
    for _ in range(count):
        out.append(sampler.batch(consumed).tolist())
        consumed = sampler.after(consumed)
    return out


def test_the_end_of_an_epoch():
    """What the last 2 of 8 samples become with batches of 3."""
    made = {last: batches(BatchSampler(8, 3, last=last), 5) for last in ("join", "drop", "pad")}
    assert made["join"] == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3], [4, 5, 6]]
    assert made["drop"] == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert made["pad"] == [[0, 1, 2], [3, 4, 5], [6, 7, -1], [0, 1, 2], [3, 4, 5]]
    states = [BatchSampler(8, 3, last=last).state() for last in made]
    assert all(a != b for a, b in itertools.combinations(states, 2))
    assert "last" not in states[0]  # as in the checkpoints of earlier versions
    assert batches(BatchSampler(2, 3, last="pad"), 2) == [[0, 1, -1]] * 2


@given(
    num=st.integers(1, 40),
    size=st.integers(1, 9),
    last=st.sampled_from(["drop", "pad"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_whole_epochs_come_one_by_one(num, size, last, seed):
    """U17: every epoch is a pass over its own order, but for what is left out at its end."""
    if last == "drop" and num < size:
        with pytest.raises(ValueError, match=f"epoch of {num} samples holds no batch of {size}"):
            BatchSampler(num, size, seed, True, last)
        return
    sampler = BatchSampler(num, size, seed, True, last)
    steps = num // size if last == "drop" else -(-num // size)
    stream = batches(sampler, 2 * steps)
    for epoch in range(2):
        shown = list(chain(*stream[epoch * steps : (epoch + 1) * steps]))
        order = shuffled_order(np.arange(num), num_samples=num, seed=seed, epoch=epoch).tolist()
        kept = steps * size if last == "drop" else num
        assert shown == order[:kept] + [-1] * (len(shown) - kept)


def test_a_growing_batch():
    """Sizes by samples consumed: 4, 6, 8, each for a half of 20 samples, then 8 for good."""
    ramp = BatchRamp(start=4, increment=2, samples=20)
    sampler = BatchSampler(100, 8, ramp=ramp)
    sizes = [len(batch) for batch in batches(sampler, 8)]
    assert sizes == [4, 4, 4, 6, 6, 8, 8, 8]
    assert list(chain(*batches(sampler, 8))) == list(range(sum(sizes)))
    assert [sampler.size(n) for n in (0, 9, 10, 19, 20, 10**9)] == [4, 4, 6, 6, 8, 8]
    assert list(sampler.sizes()) == [4, 6, 8]
    assert BatchSampler(9, 4, ramp=BatchRamp(start=4, increment=3, samples=5)).size(0) == 4
    for start, final, nearest in ((4, 9, 8), (4, 3, 4)):
        message = f"batch of {final} samples is not reached from {start} .* nearest: {nearest}"
        with pytest.raises(ValueError, match=message):
            BatchSampler(100, final, ramp=BatchRamp(start=start, increment=2, samples=20))
    with pytest.raises(ValueError, match="ramp samples is 0"):
        BatchRamp(start=1, increment=1, samples=0)


def test_a_batch_in_steps():
    """U06: 4 samples from 0 consumed ones on, 8 from 16 on; resumed at 12 it goes on with 4, 8."""
    steps = BatchSteps(starts=(0, 16), batches=(4, 8))
    sampler = BatchSampler(100, 8, ramp=steps)
    assert [sampler.size(n) for n in (0, 4, 8, 12, 16, 17, 99)] == [4, 4, 4, 4, 8, 8, 8]
    resumed = BatchSampler(100, 8, ramp=steps)
    first = resumed.batch(12)
    after = resumed.after(12)
    assert (len(first), after, len(resumed.batch(after))) == (4, 16, 8)
    assert list(chain(*batches(sampler, 6))) == list(range(32))
    # The even ramp can say the same, and is honoured too.
    even = BatchSampler(100, 8, ramp=BatchRamp(start=4, increment=4, samples=16))
    assert [even.size(n) for n in (0, 4, 8, 12, 16)] == [4, 4, 4, 4, 8]
    down = BatchSampler(100, 2, ramp=BatchSteps(starts=(0, 3, 9), batches=(3, 6, 2)))
    assert [len(batch) for batch in batches(down, 4)] == [3, 6, 2, 2]
    assert list(down.sizes()) == [2, 3, 6]
    for starts, sizes, final, message in (
        ((0, 16), (4, 8), 9, "the batch ends with 8 samples, global_batch_size is 9: use 8"),
        ((1, 16), (4, 8), 8, "each takes a start, the first of them 0"),
        ((0,), (4, 8), 8, "each takes a start"),
        ((0, 5, 5), (4, 6, 8), 8, r"the starts \[0, 5, 5\] of batch sizes do not rise"),
        ((0, 5), (0, 8), 8, "a batch of 0 samples"),
    ):
        with pytest.raises(ValueError, match=message):
            BatchSampler(100, final, ramp=BatchSteps(starts=starts, batches=sizes))


@given(
    start=st.integers(1, 4),
    increment=st.integers(1, 4),
    steps=st.integers(0, 4),
    samples=st.integers(1, 60),
    num=st.integers(1, 50),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_a_growing_batch_takes_every_sample_in_turn(start, increment, steps, samples, num, stops):
    """Stopped anywhere or not, batches of growing size are stretches of the one stream (U17)."""
    final = start + steps * increment
    ramp = BatchRamp(start=start, increment=increment, samples=samples)
    sampler = BatchSampler(num, final, 5, True, ramp=ramp)
    whole = BatchSampler(num, 1, 5, True).take(0, 60 * final).tolist()
    consumed, before = 0, 0
    for stop in [*stops, 3]:
        resumed = BatchSampler(num, final, 5, True, ramp=ramp)
        for _ in range(stop):
            batch = resumed.batch(consumed).tolist()
            assert batch == sampler.batch(consumed).tolist()
            assert batch == whole[consumed : consumed + len(batch)]
            assert before <= len(batch) <= final
            before, consumed = len(batch), resumed.after(consumed)


@given(num=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_every_epoch_is_a_permutation(num, seed, epoch):
    order = shuffled_order(np.arange(num), num_samples=num, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num))


def test_shuffle_spreads_evenly():
    """Every sample is about equally often at every place, and neighbours are torn apart."""
    num, epochs = 12, 2000
    orders = np.stack(
        [shuffled_order(np.arange(num), num_samples=num, seed=1, epoch=e) for e in range(epochs)]
    )
    counts = np.stack([np.bincount(orders[:, i], minlength=num) for i in range(num)])
    expected = epochs / num
    chi2 = ((counts - expected) ** 2 / expected).sum()  # mean 121, standard deviation 15.6
    assert chi2 < 121 + 5 * 15.6
    follows = (np.diff(orders, axis=1) == 1).mean()
    assert abs(follows - 1 / num) < 0.015
    big = shuffled_order(np.arange(5000), num_samples=10**9, seed=3, epoch=2)
    assert len(set(big.tolist())) == 5000
    assert abs(big.mean() / 10**9 - 0.5) < 0.03
    assert abs(np.corrcoef(np.arange(5000), big)[0, 1]) < 0.07


def test_order_is_frozen():
    """Runs are resumed by samples consumed: the order for a seed may never change."""
    first = BatchSampler(10, 10, seed=1234, shuffle=True)
    assert first.batch(0).tolist() == [8, 1, 9, 0, 4, 5, 2, 7, 6, 3]
    assert first.batch(10).tolist() == [8, 5, 4, 1, 3, 6, 0, 2, 7, 9]
    far = shuffled_order([0, 1, 2], num_samples=10**12, seed=5, epoch=0)
    assert far.tolist() == [532436300994, 24761100129, 837305317688]


def test_bad_arguments():
    for arguments, named in (((0, 2), "num_samples is 0"), ((5, 0), "global_batch_size is 0")):
        with pytest.raises(ValueError, match=named):
            BatchSampler(*arguments)
    with pytest.raises(ValueError, match="last is 'keep', it can be join, drop or pad"):
        BatchSampler(5, 2, last="keep")
    with pytest.raises(ValueError, match="consumed -1 and count 2"):
        BatchSampler(5, 2).batch(-1)
    with pytest.raises(ValueError, match="position 5 lies outside an epoch of 5"):
        shuffled_order([5], num_samples=5, seed=0, epoch=0)

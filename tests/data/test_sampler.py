from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_data import BatchSampler, shuffled_order


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


@given(num=st.integers(1, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
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
    with pytest.raises(ValueError, match="consumed -1 and count 2"):
        BatchSampler(5, 2).batch(-1)
    with pytest.raises(ValueError, match="position 5 lies outside an epoch of 5"):
        shuffled_order([5], num_samples=5, seed=0, epoch=0)

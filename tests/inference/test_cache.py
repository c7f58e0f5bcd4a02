"""Every sequence gets back what it put in, in order, whatever comes and goes beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_inference import ContiguousCache

CPU = torch.device("cpu")
SHAPE = (2, 3)  # kv heads, head size
LAYERS = (4, 9)


def fresh(rows: int, start: int) -> Tensor:
    """Keys that occur once."""
    return torch.arange(start, start + rows)[:, None, None] * torch.ones(SHAPE)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_pool_is_as_good_as_a_list_per_sequence(data: st.DataObject) -> None:
    cache = ContiguousCache()
    history: dict[int, list[Tensor]] = {}
    room: dict[int, int] = {}
    serial = 0
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 2))):
            capacity = data.draw(st.integers(1, 6))
            sequence = cache.open(capacity)
            assert sequence not in history
            history[sequence], room[sequence] = [], capacity
        closing = data.draw(st.lists(st.sampled_from(sorted(history)), unique=True, max_size=1)
                            if history else st.just([]))  # fmt: skip
        for sequence in closing:
            cache.close(sequence)
            del history[sequence], room[sequence]
        free = sorted(n for n in history if room[n])
        if not free:
            continue
        batch = data.draw(st.lists(st.sampled_from(free), unique=True, min_size=1))
        new = [(n, data.draw(st.integers(1, room[n]))) for n in batch]
        total = sum(count for _, count in new)
        cache.begin(new, CPU)
        for layer in LAYERS:
            k = fresh(total, serial) + layer / 10
            keys, values, bounds, longest = cache.extend(layer, k, -k)
            if layer == LAYERS[0]:
                for (n, count), rows in zip(new, torch.split(k, [c for _, c in new]), strict=True):
                    history[n].append(rows - layer / 10)
                    room[n] -= count
            expected = [torch.cat(history[n]) + layer / 10 for n, _ in new]
            assert torch.equal(keys, torch.cat(expected))
            assert torch.equal(values, -torch.cat(expected))
            lengths = [len(rows) for rows in expected]
            assert bounds.dtype == torch.int32
            assert bounds.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            assert longest == max(lengths)
            assert [cache.length(n) for n, _ in new] == lengths
        serial += total


def test_slots_are_used_again_and_forgotten_when_nothing_is_open() -> None:
    cache = ContiguousCache()
    first, second = cache.open(4), cache.open(4)
    cache.begin([(first, 2), (second, 4)], CPU)
    k = fresh(6, 0)
    cache.extend(0, k, k)
    assert cache.num_slots == 8
    cache.close(first)
    third = cache.open(3)  # into the gap
    assert cache.num_slots == 8
    fourth = cache.open(2)  # not into what is left of it
    assert cache.num_slots == 10
    assert cache.length(third) == 0
    cache.begin([(fourth, 2), (third, 1)], CPU)
    k = fresh(3, 100)
    keys, _, _, _ = cache.extend(0, k, k)
    assert torch.equal(keys, k)  # the pool has grown and nothing old shows
    cache.begin([(second, 0), (third, 1)], CPU)
    keys, _, _, _ = cache.extend(0, fresh(1, 200), fresh(1, 200))
    assert keys[:, 0, 0].tolist() == [2, 3, 4, 5, 102, 200]
    for sequence in (second, third, fourth):
        cache.close(sequence)
    assert cache.num_slots == 0
    assert not cache._layers


def test_one_sequence_alone_is_read_without_a_copy() -> None:
    cache = ContiguousCache()
    cache.open(5)
    sequence = cache.open(5)
    cache.begin([(sequence, 3)], CPU)
    keys, values, _, _ = cache.extend(0, fresh(3, 0), fresh(3, 0))
    pool = cache._layers[0][0]
    assert keys.data_ptr() == pool[5:].data_ptr()
    assert keys.shape == (3, *SHAPE)
    assert values.shape == (3, *SHAPE)


def test_outgrowing_the_slots_is_refused_and_changes_nothing() -> None:
    cache = ContiguousCache()
    one, two = cache.open(4), cache.open(2)
    with pytest.raises(ValueError, match="sequence 1 needs 3 token slots and has 2"):
        cache.begin([(one, 1), (two, 3)], CPU)
    assert cache.length(one) == 0
    with pytest.raises(ValueError, match="a sequence needs at least 1 token slot, not 0"):
        cache.open(0)


def test_keys_and_values_may_differ_in_size() -> None:
    cache = ContiguousCache()
    one, two = cache.open(2), cache.open(2)
    cache.begin([(one, 1), (two, 1)], CPU)
    keys, values, _, _ = cache.extend(0, torch.ones(2, 2, 8), torch.ones(2, 2, 5))
    assert (keys.shape, values.shape) == ((2, 2, 8), (2, 2, 5))

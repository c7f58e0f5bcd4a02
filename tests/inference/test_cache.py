"""Every sequence gets back what it put in, in order, whatever comes and goes beside it."""

import weakref

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


# --- states of recurrent layers -----------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_states_are_as_good_as_one_of_its_own_per_sequence(data: st.DataObject) -> None:
    """Sequences join, pause and leave; a new one never finds what its slot held before."""
    cache = ContiguousCache()
    kept: dict[int, float] = {}
    serial = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 2))):
            kept[cache.open(99)] = 0.0
        for sequence in data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True, max_size=1)
                                  if kept else st.just([])):  # fmt: skip
            cache.close(sequence)
            del kept[sequence]
        if not kept:
            continue
        batch = data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True, min_size=1))
        cache.begin([(n, 1) for n in batch], CPU)
        for layer in LAYERS:
            found = cache.recall(layer)
            wanted = [kept[n] and kept[n] + layer for n in batch]
            if found is None:
                assert not any(wanted)
            else:
                assert found[0][:, 0, 0].tolist() == wanted
                assert found[1][:, 0].tolist() == [-value for value in wanted]
        for n in batch:
            serial += 100
            kept[n] = serial
        for layer in LAYERS:
            values = torch.tensor([kept[n] + layer for n in batch], dtype=torch.float64)
            first = values[:, None, None].expand(-1, 2, 3).float()
            cache.keep(layer, (first, -values[:, None].expand(-1, 4)))
    used = max([0, *(len(pool) for pools in cache._states.values() for pool in pools)])
    assert cache.num_states <= used or not cache._states


def test_states_have_a_slot_per_sequence_and_go_when_nothing_is_open() -> None:
    cache = ContiguousCache()
    first, second = cache.open(5), cache.open(7)
    cache.begin([(first, 2), (second, 1)], CPU)
    assert cache.recall(0) is None
    cache.keep(0, (torch.ones(2, 1000), torch.ones(2, 3, dtype=torch.bfloat16)))
    pools = [weakref.ref(pool) for pool in cache._states[0]]
    assert [pool().shape[0] for pool in pools] == [2, 2]  # not one for each token
    cache.close(first)
    third = cache.open(1)
    assert cache.num_states == 2
    cache.begin([(second, 1), (third, 1)], CPU)
    found = cache.recall(0)
    assert found is not None
    assert found[0].sum(1).tolist() == [1000, 0]
    assert found[1].dtype == torch.bfloat16
    cache.keep(0, found)
    del found
    for sequence in (second, third):
        cache.close(sequence)
    assert cache.num_states == 0
    assert [pool() for pool in pools] == [None, None]


def test_states_of_all_that_is_open_are_read_without_a_copy() -> None:
    cache = ContiguousCache()
    batch = [(cache.open(3), 1) for _ in range(3)]
    cache.begin(batch, CPU)
    cache.keep(0, (torch.ones(3, 2),))
    cache.begin(batch, CPU)
    found = cache.recall(0)
    assert found is not None
    assert found[0].data_ptr() == cache._states[0][0].data_ptr()
    cache.begin(batch[1:], CPU)
    found = cache.recall(0)
    assert found is not None
    assert found[0].data_ptr() == cache._states[0][0][1:].data_ptr()

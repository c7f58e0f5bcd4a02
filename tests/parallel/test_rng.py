import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_parallel.rng import (
    RngKey,
    RngStreams,
    counter_normal,
    counter_uniform,
    dropout,
    dropout_mask,
    uniform_bits,
)

N = 200_000
KEYS = [RngKey(0), RngKey(1), RngKey(0).fold("a"), RngKey(0).fold(1), RngKey(0).fold(1, "a")]


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


def splitmix64(state: int) -> int:
    """The published generator's output for a state, in Python integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64_at_the_counter() -> None:
    assert splitmix64(1234567) == 6457827717110365317  # the reference implementation's first output
    key = RngKey(99)
    index = torch.tensor([0, 1, 5, 2**40, -1])
    bits = uniform_bits(key, index)
    start = splitmix64(99)
    for i, found in zip(index.tolist(), bits.tolist(), strict=True):
        state = start + (i - 1) * 0x9E3779B97F4A7C15
        assert found % 2**64 == splitmix64(state % 2**64)


def test_keys_and_draws_never_change_between_versions() -> None:
    key = RngKey(7).fold("layers.0.mlp.up.weight", 3)
    assert key == RngKey(16542578897331253003)
    assert uniform_bits(key, torch.tensor([11])).item() == -6130400140661565084
    assert counter_normal(key, torch.tensor([11])).item() == pytest.approx(-1.07285511, rel=1e-6)


def test_folding_is_stepwise_ordered_and_tells_text_from_numbers() -> None:
    key = RngKey(5)
    assert key.fold(1, "a") == key.fold(1).fold("a")
    values: list[tuple[int | str, ...]]
    values = [(), (0,), (1,), (-1,), ("1",), ("",), (0, 1), (1, 0), (2**63,)]
    folded = [key.fold(*v) for v in values]
    assert len({k.seed for k in folded}) == len(folded)
    assert len({RngKey(s).fold(v).seed for s in range(100) for v in range(100)}) == 10_000


@pytest.mark.parametrize("key", KEYS)
def test_normal_has_the_moments_and_tails_of_the_normal(key: RngKey) -> None:
    x = counter_normal(key, torch.arange(N)).double()
    error = 5 / math.sqrt(N)
    assert abs(x.mean()) < error
    assert abs(x.var() - 1) < error * math.sqrt(2)
    assert abs((x**3).mean()) < error * math.sqrt(15)
    assert abs((x**4).mean() - 3) < error * math.sqrt(96)
    for z in (0.5, 1.0, 2.0, 3.0):
        expected = math.erfc(z / math.sqrt(2)) / 2
        spread = math.sqrt(expected / N)
        assert abs((x > z).double().mean() - expected) < 5 * spread
        assert abs((x < -z).double().mean() - expected) < 5 * spread


@pytest.mark.parametrize("key", KEYS)
def test_uniform_is_flat_and_below_one(key: RngKey) -> None:
    x = counter_uniform(key, torch.arange(N))
    assert x.dtype == torch.float32
    assert x.min() >= 0
    assert x.max() < 1
    counts = torch.histc(x.double(), bins=64, min=0, max=1)
    chi_squared = float(((counts - N / 64) ** 2 / (N / 64)).sum())
    assert chi_squared < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("draw", [counter_normal, counter_uniform])
def test_neighbours_keys_folds_and_replayed_streams_are_uncorrelated(draw: object) -> None:
    assert callable(draw)
    index = torch.arange(N)
    x = draw(KEYS[0], index)
    bound = 5 / math.sqrt(N)
    for lag in (1, 2, 7, 64, 1024):
        assert abs(correlation(x[:-lag], x[lag:])) < bound
        assert abs(correlation(x[:-lag].abs(), x[lag:].abs())) < bound
    for other in KEYS[1:]:
        assert abs(correlation(x, draw(other, index))) < bound
    assert abs(correlation(x, draw(KEYS[0], index + 2**32))) < bound


def test_every_bit_is_set_half_of_the_time_and_flips_half_of_the_others() -> None:
    bits = uniform_bits(RngKey(3), torch.arange(N))
    shifts = torch.arange(64)
    share = ((bits[:, None] >> shifts) & 1).double().mean(0)
    assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(N)
    few = torch.arange(N // 20)
    flipped = bits[: N // 20, None] ^ uniform_bits(RngKey(3), few[:, None] ^ (1 << shifts[:20]))
    share = ((flipped[..., None] >> shifts[::7]) & 1).double().mean(0)
    assert (share - 0.5).abs().max() < 6 * 0.5 / math.sqrt(N // 20)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 3000))
def test_a_value_depends_on_key_and_index_only(seed: int, size: int) -> None:
    key = RngKey(seed)
    whole = counter_normal(key, torch.arange(3000))
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(seed % 2**32))[:size]
    assert torch.equal(counter_normal(key, order), whole[order])
    assert counter_normal(key, order[0]).item() == whole[order[0]].item()
    columns = order[: size // 2 * 2].view(-1, 2).t()
    assert torch.equal(counter_normal(key, columns), whole[columns])


def test_a_value_does_not_depend_on_the_size_of_the_request() -> None:
    key = RngKey(2)
    long = counter_normal(key, torch.arange(150_001))
    assert torch.equal(counter_normal(key, torch.arange(65_530, 65_543)), long[65_530:65_543])
    assert counter_normal(key, torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_values() -> None:
    key, index = RngKey(6), torch.arange(-1000, N)
    there = index.cuda()
    assert torch.equal(uniform_bits(key, there).cpu(), uniform_bits(key, index))
    assert torch.equal(counter_uniform(key, there).cpu(), counter_uniform(key, index))
    normal = counter_normal(key, index)
    close = torch.isclose(counter_normal(key, there).cpu(), normal, rtol=1e-6, atol=1e-6)
    assert close.all()  # logarithm and cosine may round the last bit of float64 differently
    assert (counter_normal(key, there).cpu() == normal).double().mean() > 0.9999
    x = torch.ones(300, 200)
    assert torch.equal(dropout(x.cuda(), 0.4, key).cpu(), dropout(x, 0.4, key))


def test_dropout_drops_the_right_share_and_keeps_the_mean() -> None:
    x = torch.ones(500, 400)
    for p in (0.1, 0.5, 0.9):
        y = dropout(x, p, RngKey(1))
        dropped = float((y == 0).double().mean())
        assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / x.numel())
        assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    mask = dropout_mask(RngKey(1), torch.arange(500), 400, 0.5).double()
    bound = 5 / math.sqrt(mask.numel())
    assert abs(correlation(mask[1:].flatten(), mask[:-1].flatten())) < bound
    assert abs(correlation(mask[:, 1:].flatten(), mask[:, :-1].flatten())) < bound
    other = dropout_mask(RngKey(2), torch.arange(500), 400, 0.5).double()
    assert abs(correlation(mask.flatten(), other.flatten())) < bound


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 9), st.integers(0, 2**32))
def test_dropout_drops_the_same_elements_under_every_layout(
    rows: int, cols: int, cut: int, seed: int
) -> None:
    """Tokens in another order, on another rank, columns cut in two: one mask."""
    key, cut = RngKey(seed), min(cut, cols)
    x = torch.ones(rows, cols)
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:rows]
    whole = dropout(x, 0.5, key, ids)
    order = torch.randperm(rows)
    assert torch.equal(dropout(x, 0.5, key, ids[order]), whole[order])
    left = dropout(x[:, :cut], 0.5, key, ids)
    right = dropout(x[:, cut:], 0.5, key, ids, cols_offset=cut)
    assert torch.equal(torch.cat([left, right], 1), whole)


def test_dropout_without_row_ids_counts_rows() -> None:
    x = torch.randn(6, 5)
    assert torch.equal(dropout(x, 0.5, RngKey(4)), dropout(x, 0.5, RngKey(4), torch.arange(6)))


def test_the_gradient_of_dropout_is_its_mask() -> None:
    x = torch.randn(8, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 7, dtype=torch.float64)
    y = dropout(x, 0.3, RngKey(4))
    torch.autograd.backward((y * weight).sum())
    assert x.grad is not None
    assert torch.allclose(x.grad, weight * y.detach() / x.detach(), rtol=1e-12)
    half = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(half, 0.5, RngKey(4))
    torch.autograd.backward(3 * y.sum())
    assert y.dtype == torch.bfloat16
    assert half.grad is not None
    assert torch.equal(half.grad, 3 * y.detach())


def test_dropout_of_probability_zero_is_the_input_and_bad_input_is_refused() -> None:
    x = torch.randn(4, 3)
    assert dropout(x, 0.0, RngKey(0)) is x
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"probability {p} must lie in 0 ≤ p < 1"):
            dropout(x, p, RngKey(0))
    with pytest.raises(ValueError, match=r"needs a \[T, H\] tensor, not shape \[4\]"):
        dropout(x[:, 0], 0.1, RngKey(0))
    with pytest.raises(ValueError, match=r"\[3\] row ids for 4 rows"):
        dropout(x, 0.1, RngKey(0), torch.arange(3))


def test_streams_resume_through_json_and_differ_when_they_are_not_restored() -> None:
    streams = RngStreams(seed=11)
    drawn = [streams.next("dropout") for _ in range(3)] + [streams.next("data")]
    assert len({key.seed for key in drawn}) == 4
    state = streams.state_dict()
    expected = [streams.next("dropout"), streams.next("data")]
    resumed = RngStreams(seed=0)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert [resumed.next("dropout"), resumed.next("data")] == expected
    assert resumed.state_dict() == streams.state_dict()
    forgotten = RngStreams(seed=11)
    assert [forgotten.next("dropout"), forgotten.next("data")] != expected
    assert state["counters"] == {"dropout": 3, "data": 1}, "a saved state does not move along"

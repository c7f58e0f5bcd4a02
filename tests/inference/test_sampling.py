"""Tokens are drawn from the distribution that the parameters describe, and from nothing else."""

import math
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_inference import (
    SamplingParams,
    allowed_probabilities,
    draw,
    greedy,
    log_probabilities,
    sample,
    top_log_probabilities,
)

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.5, -1.0, 2.5, 0.5, -4.0])


def allowed(logits: Tensor, **params: float) -> list[float]:
    rules = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    row: list[float] = allowed_probabilities(logits[None], [rules])[0].tolist()
    return row


def oracle(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition, one token at a time."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[: top_k or None]
    total = sum(weights[i] for i in kept)
    if top_p < 1:
        mass = 0.0
        for count, i in enumerate(kept, 1):
            mass += weights[i] / total
            if mass >= top_p - 1e-6 * (1 - top_p):
                kept = kept[:count]
                break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(-3, 3), min_size=6, max_size=6),
            st.sampled_from([0.3, 1.0, 4.0]),
            st.integers(0, 8),
            st.sampled_from([1e-9, 0.2, 0.5, 0.75, 0.9, 0.999, 1.0]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_cutoffs_equal_their_definition(
    rows: list[tuple[list[int], float, int, float]],
) -> None:
    """Integer logits, so that ties are everywhere."""
    logits = torch.tensor([row[0] for row in rows], dtype=torch.float32)
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for _, t, k, p in rows]
    got = allowed_probabilities(logits, params)
    assert got.dtype == torch.float64
    for (values, t, k, p), row in zip(rows, got.tolist(), strict=True):
        expected = oracle([float(x) for x in values], t, k, p)
        assert row == pytest.approx(expected, abs=1e-12)
        assert [x == 0 for x in row] == [x == 0 for x in expected]


def test_ties_at_an_edge_go_to_the_lowest_ids() -> None:
    flat = torch.zeros(5)
    assert allowed(flat, top_k=2) == [0.5, 0.5, 0, 0, 0]
    assert allowed(flat, top_p=0.6) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert allowed(flat, top_p=0.601)[:4] == pytest.approx([0.25] * 4)
    many = allowed(torch.zeros(5000), top_k=3000)
    assert many == pytest.approx([1 / 3000] * 3000 + [0.0] * 2000)
    assert allowed(LOGITS, top_k=2)[3] > 0  # 3 and 5 have equal logits
    assert allowed(LOGITS, top_k=2)[5] == 0
    assert greedy(torch.tensor([[1.0, 7.0, 7.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_cutoffs_at_their_limits_keep_one_token_or_all() -> None:
    everything = torch.softmax(LOGITS.double(), -1).tolist()
    for params in ({}, {"top_k": 8}, {"top_k": 1000}, {"top_p": 1.0}, {"top_k": 0}):
        assert allowed(LOGITS, **params) == pytest.approx(everything, abs=1e-15)
    one = [0.0, 1, 0, 0, 0, 0, 0, 0]
    for params in ({"top_k": 1}, {"top_p": 1e-12}, {"temperature": 0}, {"temperature": 1e-320}):
        assert allowed(LOGITS, **params) == one
    assert min(allowed(LOGITS, top_p=1 - 1e-12)) > 0
    steep = torch.tensor([0.0, -50.0, -60.0])  # the first alone rounds to 1
    assert [x > 0 for x in allowed(steep, top_k=2, top_p=1.0)] == [True, True, False]
    hot = allowed(LOGITS, temperature=1e9)
    assert hot == pytest.approx([1 / 8] * 8, abs=1e-8)


def test_top_p_is_reached_by_a_sum_that_rounding_leaves_short() -> None:
    """.5 + .3 reach .8, although their logarithms in float32 do not quite."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for shift in range(-20, 20):
        row = allowed(logits + shift / 7, top_p=0.8)
        assert row[2:] == [0, 0]
        assert math.log(row[0]) == pytest.approx(-0.470004, abs=1e-5)
    raw = log_probabilities(logits[None], torch.tensor([0]))
    assert raw.item() == pytest.approx(-0.693147, abs=1e-6)


def test_a_draw_says_how_probable_it_was() -> None:
    """U55: ln of the probability drawn with, after the cuts; the raw one stands beside it."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(200, -1)
    params = [SamplingParams(temperature=1.0, top_p=0.8, seed=seed) for seed in range(200)]
    tokens, drawn = draw(logits, params, [0] * 200)
    raw = log_probabilities(logits, tokens)
    assert set(tokens.tolist()) == {0, 1}
    for token, p in ((0, 0.5), (1, 0.3)):
        rows = tokens == token
        torch.testing.assert_close(drawn[rows], torch.full((int(rows.sum()),), math.log(p / 0.8)))
        torch.testing.assert_close(raw[rows], torch.full((int(rows.sum()),), math.log(p)))
    assert math.log(0.5) == pytest.approx(-0.693147, abs=1e-6)
    assert math.log(0.5 / 0.8) == pytest.approx(-0.470004, abs=1e-6)
    mixed = [SamplingParams(temperature=t, seed=1) for t in (0.0, 2.0)]
    tokens, drawn = draw(logits[:2], mixed, [0, 0])
    warm = (logits[1] / 2).log_softmax(-1)[tokens[1]]
    torch.testing.assert_close(drawn, torch.stack([torch.zeros(()), warm]))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_many_samples_have_the_distribution(params: dict[str, float], over: str) -> None:
    """Pearson's statistic over as many seeds, or positions of one seed, below its 1e-4 quantile."""
    count = 4000
    seeds = range(count) if over == "seeds" else [5] * count
    positions = list(range(count)) if over == "positions" else [3] * count
    rules = [SamplingParams(seed=seed, **params) for seed in seeds]  # type: ignore[arg-type]
    drawn = Counter(sample(LOGITS.expand(count, -1), rules, positions).tolist())
    p = allowed(LOGITS, **params)
    possible = [token for token, value in enumerate(p) if value > 0]
    assert set(drawn) <= set(possible)
    statistic = sum((drawn[i] - count * p[i]) ** 2 / (count * p[i]) for i in possible)
    quantiles = {2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}
    assert statistic < quantiles[len(possible) - 1]


def test_draws_of_one_seed_do_not_hang_together() -> None:
    """Two fair tokens: neighbours of one seed and of one position agree half of the time."""
    count = 4000
    logits = torch.zeros(count, 2)
    one = [SamplingParams(temperature=1.0, seed=5)] * count
    many = [SamplingParams(temperature=1.0, seed=seed) for seed in range(count)]
    for draws in (sample(logits, one, range(count)), sample(logits, many, [0] * count)):
        agree = (draws[1:] == draws[:-1]).double().mean().item()
        assert abs(agree - 0.5) < 4 * 0.5 / math.sqrt(count)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator) * 3
    rules = [
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_k=4, seed=3),
        SamplingParams(temperature=2.0, top_p=0.7, seed=-8),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.5, seed=2**70),
        SamplingParams(temperature=1.0, seed=3),
    ]
    positions = [0, 4, 2, 7, 1, 0]
    together = sample(logits, rules, positions).tolist()
    for row, token in enumerate(together):
        assert sample(logits[row : row + 1], [rules[row]], [positions[row]]).tolist() == [token]
    assert together[1] == int(logits[1].argmax())
    backwards = sample(logits.flip(0), rules[::-1], positions[::-1]).tolist()
    assert backwards == together[::-1]


def test_tokens_without_probability_are_never_drawn() -> None:
    """Even by the largest random number, and when the last tokens have no probability."""
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    drawn = {
        sample(logits, [SamplingParams(temperature=1.0, seed=s)], [0]).item() for s in range(60)
    }
    assert drawn == {0, 2}


def test_the_extreme_random_numbers_draw_the_first_and_last_token_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 5, generator=generator)
    logits[:, 0], logits[:, 4] = -math.inf, -2000.0
    rules = [SamplingParams(temperature=1.0)] * 300
    for u, token in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr("mcore_inference.sampling._uniform", lambda seed, position, u=u: u)
        assert sample(logits, rules, [0] * 300).tolist() == [token] * 300


def test_random_numbers_stay_the_same_over_versions() -> None:
    """What a seed gives is part of the interface: recorded samples can be drawn again."""
    logits = torch.zeros(6, 1000)
    rules = [SamplingParams(temperature=1.0, seed=seed) for seed in (0, 0, 1, 1, -1, 2**64)]
    assert sample(logits, rules, [0, 1, 0, 1, 0, 0]).tolist() == RECORDED


RECORDED = [930, 695, 904, 740, 403, 930]


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = LOGITS.repeat(3, 1) * torch.tensor([[1.0], [0.0], [50.0]])
    tokens = torch.tensor([3, 0, 7])
    wide = torch.log_softmax(logits.double(), -1)
    expected = [wide[row, token].item() for row, token in enumerate(tokens)]
    assert log_probabilities(logits, tokens).tolist() == pytest.approx(expected, rel=1e-6)
    half = log_probabilities(logits.bfloat16(), tokens)
    assert half.dtype == torch.float32


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1 must be a whole number of at least 0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number of at least 0"),
        ({"top_k": -2}, "top_k=-2 must be a whole number of at least 0"),
        ({"temperature": -0.1}, "temperature=-0.1 must be finite and at least 0"),
        ({"temperature": math.nan}, "temperature=nan must be finite and at least 0"),
        ({"temperature": math.inf}, "temperature=inf must be finite and at least 0"),
        ({"top_p": 0}, "top_p=0 must lie in 0 < top_p <= 1"),
        ({"top_p": 1.01}, "top_p=1.01 must lie in 0 < top_p <= 1"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"top_p": "1"}, "top_p='1' must be a number"),
        ({"stop": 3}, "stop=3 must be a list"),
        ({"stop_token_ids": 3}, "stop_token_ids=3 must be a list"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids=(3, -1) must be whole numbers of at least 0"),
        ({"n": 0}, "n=0 must be a whole number of at least 1"),
        ({"top_logprobs": -1}, "top_logprobs=-1 must be a whole number of at least 0"),
        ({"stop": ["a", ""]}, "stop=('a', '') must be strings of at least one character"),
        ({"stop": [3]}, "stop=(3,) must be strings of at least one character"),
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_the_most_probable_tokens_come_best_first_and_ties_in_order() -> None:
    logits = torch.stack([LOGITS, torch.zeros(8), -LOGITS])
    wide = torch.log_softmax(logits.double(), -1)
    for k in (1, 3, 8, 20):
        for row, top in zip(wide.tolist(), top_log_probabilities(logits, k), strict=True):
            order = sorted(range(8), key=lambda i, row=row: (-row[i], i))[:k]
            assert len(top) == min(k, 8)
            assert [p for _, p in top] == pytest.approx([row[i] for i in order], abs=1e-6)
            assert [i for i, _ in top] == order
    (among,) = top_log_probabilities(LOGITS[None], 9, among=3)
    assert [i for i, _ in among] == [1, 0, 2]
    assert among[0][1] == pytest.approx(wide[0, 1].item(), abs=1e-6)
    assert top_log_probabilities(logits, 0) == [(), (), ()]


def test_each_sample_has_its_own_seed_and_the_first_the_given_one() -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.0, stop="x")
    each = params.each()
    assert [one.n for one in each] == [1] * 4
    assert each[0].seed == 7
    assert len({one.seed for one in each}) == 4
    assert {one.stop for one in each} == {("x",)}
    assert SamplingParams(n=2, seed=7).each()[1].seed == each[1].seed
    assert SamplingParams(n=2, seed=8).each()[1].seed != each[1].seed
    alone = SamplingParams(seed=3)
    assert alone.each() == (alone,)


def test_a_row_that_has_no_distribution_is_named() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    for cut in (0, 2):
        warm = [SamplingParams(temperature=1.0, top_k=cut)] * 3
        with pytest.raises(ValueError, match="row 1 of the logits has a NaN"):
            draw(logits, warm, [0, 0, 0])

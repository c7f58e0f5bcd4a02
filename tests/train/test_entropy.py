import numpy as np
import pytest

from mcore_train.entropy import bigram_entropy, unigram_entropy


def test_uniform_tokens() -> None:
    tokens = np.tile(np.arange(8), 50)
    assert unigram_entropy(tokens) == pytest.approx(np.log(8))
    assert bigram_entropy(tokens) == pytest.approx(0, abs=1e-9)  # each token fixes the next


def test_independent_tokens_gain_nothing_from_the_one_before() -> None:
    tokens = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint16)
    assert unigram_entropy(tokens) == pytest.approx(np.log(4), rel=1e-4)
    assert bigram_entropy(tokens) == pytest.approx(np.log(4), rel=1e-3)


def test_known_pairs() -> None:
    tokens = np.array([0, 0, 0, 1, 0])  # pairs 00 00 01 10
    first = unigram_entropy(np.array([0, 0, 0, 1]))
    assert bigram_entropy(tokens) == pytest.approx(unigram_entropy(np.array([0, 0, 1, 2])) - first)

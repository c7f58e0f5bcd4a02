"""How well one can guess tokens without a model: the lines to beat in a loss curve."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unigram_entropy(tokens: NDArray[np.integer]) -> float:
    """Entropy in nats per token of the tokens' own frequencies."""
    _, counts = np.unique(tokens, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


def bigram_entropy(tokens: NDArray[np.integer]) -> float:
    """Entropy in nats of a token given the one before it, by the text's own pair frequencies.

    A lower bound that no bigram model fitted on other text reaches.
    """
    first = tokens[:-1].astype(np.int64)
    pairs = first * (int(tokens.max()) + 1) + tokens[1:]
    return unigram_entropy(pairs) - unigram_entropy(first)

"""How the next token is chosen.

N sequences, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import RngKey, counter_uniform


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of sampling.

    `temperature` 0 is greedy. `top_k` keeps the k most probable tokens (0: all), then `top_p` the
    smallest set of the most probable whose probability is at least p. `seed` makes a sample a
    function of (seed, position) alone: the same text whatever else is in the batch. Generation
    ends after `max_tokens`, at a stop token, or, unless `ignore_eos`, at the end-of-document token.

    Raises:
        ValueError: a value is out of range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 0")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0: all)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in 0 < top_p <= 1")


def greedy(logits: Tensor) -> Tensor:
    """Return the most probable token of each row of [N, V]; ties go to the lowest id."""
    best = logits == logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(best, ids, logits.shape[-1]).amin(-1)


def allowed_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution [V] (float64) that `params` samples from, for one row of logits.

    Ties at the edge of top-k and top-p go to the lowest ids, so that exactly k tokens stay.
    """
    scaled = logits.double() / params.temperature
    order = torch.sort(scaled, descending=True, stable=True).indices
    p = torch.softmax(scaled, -1)[order]
    if params.top_k:
        p[params.top_k :] = 0
        p = p / p.sum()
    before = p.cumsum(0) - p
    p = torch.where(before < params.top_p, p, 0.0)
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Return the next token [N] int64 of each row of logits [N, V].

    Args:
        logits: [N, V], real vocabulary only.
        params: one per row.
        positions: number of tokens generated so far by each row; with the seed it determines the
            random number used.
    """
    chosen = greedy(logits)
    for row, (param, position) in enumerate(zip(params, positions, strict=True)):
        if param.temperature > 0:
            p = allowed_probabilities(logits[row], param)
            key = RngKey(param.seed).fold("sample", position)
            u = counter_uniform(key, torch.zeros(1, dtype=torch.int64, device=logits.device))
            total = p.cumsum(0)
            # The last token with p > 0 catches u beyond a cumulative sum that rounds below 1.
            chosen[row] = torch.searchsorted(total, u.double() * total[-1], right=True).clamp(
                max=int(p.nonzero().max())
            )[0]
    return chosen

"""What surrounds a draw: its random numbers, penalties on what was said, log-probabilities.

N rows, V vocabulary entries, L tokens of a history.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as int64
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number [N] in [0, 1), float64, for each seed [N] and position [N] (int64).

    A function of the two alone, the same on every device: two rounds of the finaliser of SplitMix64
    (Steele, Lea and Flood 2014), of whose 64 bits the upper 53 are taken.
    """
    mixed = _mix(_mix(seeds.to(torch.int64)) + (positions.to(torch.int64) + 1) * _GOLDEN)
    return _shift(mixed, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right, zeros coming in: torch's shift of int64 brings the sign in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def penalise(
    logits: Tensor,
    *,
    prompt: Tensor,
    output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return logits [N, V], less probable at tokens that occurred; one number of each per row.

    Args:
        logits: [N, V].
        prompt: tokens that were given, int64 [N, L]; a negative id is padding.
        output: tokens that were generated, likewise.
        repetition: divides positive logits, and multiplies others, of tokens in prompt or output
            (Keskar et al. 2019, arXiv:1909.05858); 1 changes nothing.
        presence: subtracted from the logits of tokens in the output.
        frequency: subtracted once for each time that the token is in the output.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = _counts(output, wide)
    seen = (counts > 0) | (_counts(prompt, wide) > 0)
    factor = repetition.to(wide)[:, None]
    wide = torch.where(seen, torch.where(wide > 0, wide / factor, wide * factor), wide)
    wide = wide - frequency.to(wide)[:, None] * counts
    wide = wide - presence.to(wide)[:, None] * (counts > 0)
    return wide.to(logits.dtype)


def _counts(tokens: Tensor, logits: Tensor) -> Tensor:
    ones = (tokens >= 0).to(logits.dtype)
    return torch.zeros_like(logits).scatter_add_(-1, tokens.clamp(min=0), ones)


def token_logprobs(
    logits: Tensor, tokens: Tensor, *, top: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ln p [N] of `tokens` [N], and the `top` best: ids [N, top], and ln p [N, top].

    Under the softmax of logits [N, V] itself, in float32; best first, ties to the lowest ids. A
    `top` beyond V gives V.
    """
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    of_tokens = (wide.gather(-1, tokens[:, None]) - total)[:, 0]
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    return of_tokens, order, wide.gather(-1, order) - total

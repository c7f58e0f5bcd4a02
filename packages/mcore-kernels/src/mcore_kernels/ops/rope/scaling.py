"""How models stretch rotary positions beyond the lengths they were trained with, as values.

Shapes: R rotary size. Each gives the angle per position of every pair, and a factor on cos and sin
(it scales the attention scores by its square).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RopeScaling(Protocol):
    """A rule for the frequencies."""

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """The angles per position [R/2], float64; unscaled they are base^(-2i/R)."""


def plain_frequencies(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    """base^(-2i/R) for i < R/2, in float64."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    return base ** (-exponent / rotary_dim)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every position divided by one factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _at_least_one("linear", self.factor)

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """See `RopeScaling`."""
        return plain_frequencies(rotary_dim, base, device) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rule: long waves stretched, short ones kept, those between blended.

    A wave is long when it is longer than `original_length / low_freq_factor` positions, and short
    below `original_length / high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        _at_least_one("llama3", self.factor)
        _length("llama3", self.original_length)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope: llama3 scaling needs 0 < low_freq_factor < high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """See `RopeScaling`."""
        plain = plain_frequencies(rotary_dim, base, device)
        turns = self.original_length * plain / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * plain + (1.0 - kept) * plain / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): by how often a pair turns within the old length.

    Pairs that turn more than `beta_fast` times are kept, those below `beta_slow` stretched, with a
    ramp between. `attention_factor` None is the paper's 0.1 ln(factor) + 1, or the quotient of
    such terms with `mscale` and `mscale_all_dim` in place of its 1 where both are given
    (DeepSeek). `truncate` puts the ends of the ramp on whole pairs.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    given_attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least_one("yarn", self.factor)
        _length("yarn", self.original_length)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"rope: yarn scaling needs 0 < beta_slow <= beta_fast, got {self.beta_slow} and "
                f"{self.beta_fast}"
            )

    @property
    def attention_factor(self) -> float:
        """See `RopeScaling`."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._term(self.mscale) / self._term(self.mscale_all_dim)
        return self._term(1.0)

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """See `RopeScaling`."""
        plain = plain_frequencies(rotary_dim, base, device)
        low, high = (self._pair(turns, rotary_dim, base) for turns in self._betas())
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
        width = high - low if high != low else 0.001
        pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
        stretched = ((pair - low) / width).clamp(0.0, 1.0)
        return (1.0 - stretched) * plain + stretched * plain / self.factor

    def _betas(self) -> tuple[float, float]:
        return self.beta_fast, self.beta_slow

    def _pair(self, turns: float, rotary_dim: int, base: float) -> float:
        """The (fractional) pair that turns so many times within the original length."""
        return rotary_dim * math.log(self.original_length / (turns * 2 * math.pi)) / (
            2 * math.log(base)
        )  # fmt: skip

    def _term(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """A factor for each pair (Ding et al. 2024, arXiv:2402.13753), as Phi-3 has.

    Models bring one list for texts within the original length and one for longer ones: whoever
    knows the length gives the list. `extension` is the new length over the original one, from which
    `attention_factor` follows unless it is given.
    """

    factors: tuple[float, ...]
    extension: float
    original_length: int
    given_attention_factor: float | None = None

    def __post_init__(self) -> None:
        _length("longrope", self.original_length)
        if not all(0.0 < factor < math.inf for factor in self.factors):
            raise ValueError(
                f"rope: the factors of longrope scaling are positive, got {self.factors}"
            )

    @property
    def attention_factor(self) -> float:
        """See `RopeScaling`."""
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.extension <= 1.0:
            return 1.0
        return math.sqrt(1.0 + math.log(self.extension) / math.log(self.original_length))

    def frequencies(self, rotary_dim: int, base: float, device: torch.device) -> Tensor:
        """See `RopeScaling`; ValueError unless there is a factor for each pair."""
        if len(self.factors) != rotary_dim // 2:
            raise ValueError(
                f"rope: longrope scaling has {len(self.factors)} factors for {rotary_dim // 2} "
                "pairs"
            )
        factors = torch.tensor(self.factors, dtype=torch.float64, device=device)
        return plain_frequencies(rotary_dim, base, device) / factors


def _at_least_one(kind: str, factor: float) -> None:
    if not factor >= 1.0:
        raise ValueError(f"rope: the factor of {kind} scaling must be at least 1, got {factor}")


def _length(kind: str, length: int) -> None:
    if length < 2:
        raise ValueError(
            f"rope: the original length of {kind} scaling must be at least 2, got {length}"
        )

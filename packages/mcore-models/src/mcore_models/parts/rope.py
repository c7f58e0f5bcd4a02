"""The configuration of rotary positions beyond their base."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_kernels import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from mcore_models._checks import check_choice, check_positive, nearest_multiples

RopeScalingKind = Literal["linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How rotary positions (Su et al., 2021) differ from plain ones over the whole head.

    Only the first `rotary_dim` channels of a head turn; None is all of them. Pairs are channels i
    and i + rotary_dim / 2, or, `interleaved`, 2i and 2i + 1.

    `scaling` stretches positions for texts longer than `original_length`: "linear" divides them by
    `factor` (Chen et al., 2023); "llama3" does so for long waves, by `low_freq_factor` and
    `high_freq_factor` (Llama 3.1); "yarn" by how often a pair turns, `beta_fast` and `beta_slow`
    (Peng et al., 2023), where cos and sin are multiplied by `attention_factor`, else by what
    `mscale` and `mscale_all_dim` (DeepSeek) or the paper say, and `truncate` puts the ends of the
    ramp on whole pairs; "longrope" divides pair i by `short_factors[i]` in documents of at most
    `original_length` tokens and by `long_factors[i]` in longer ones, with `factor` the most that a
    text is stretched (Ding et al., 2024), from which `attention_factor` follows unless it is given.
    A text that outgrows `original_length` while it is generated keeps its earlier keys.

    `sections` are numbers of pairs that follow a token's position in time, height and width
    (Qwen2-VL); with `interleaved_sections` the axes take turns (Qwen3-VL).

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: RopeScalingKind | None = None
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    sections: tuple[int, ...] | None = None
    interleaved_sections: bool = False

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors", "sections"):
            if isinstance(getattr(self, name), list):  # as it is read from a file
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.rotary_dim is not None:
            check_positive("rope.rotary_dim", self.rotary_dim)
            if self.rotary_dim % 2:
                raise ValueError(
                    f"rope.rotary_dim={self.rotary_dim} channels turn in pairs: "
                    f"use {nearest_multiples(self.rotary_dim, 2)}"
                )
        if self.scaling is not None:
            check_choice("rope.scaling", self.scaling, get_args(RopeScalingKind))
        self._check_scaling()
        if self.interleaved_sections and self.sections is None:
            raise ValueError("rope.interleaved_sections without sections: give rope.sections")
        for value in self.sections or ():
            check_positive("each of rope.sections", value)

    def _check_scaling(self) -> None:
        scaling = self.scaling
        needed = _NEEDED[scaling]
        for name, default in _SCALING_FIELDS.items():
            value = getattr(self, name)
            if value is None and name in needed:
                raise ValueError(f"rope.scaling={scaling!r} needs rope.{name}")
            if value != default and name not in (*needed, *_OPTIONAL[scaling]):
                kinds = [
                    str(kind)
                    for kind in get_args(RopeScalingKind)
                    if name in (*_NEEDED[kind], *_OPTIONAL[kind])
                ]
                raise ValueError(
                    f"rope.{name}={value} does nothing with rope.scaling={scaling!r}: "
                    f"it belongs to {' and '.join(kinds)}"
                )
        if self.original_length is not None:
            check_positive("rope.original_length", self.original_length)
        for name in ("factor", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"rope.{name}={value} must be greater than 0 and finite")
        if scaling is not None:
            self.scalings()

    def check_size(self, head_size: int) -> None:
        """Check what turns against the size of a head; ValueError names the numbers."""
        turned = head_size if self.rotary_dim is None else self.rotary_dim
        if turned > head_size:
            raise ValueError(
                f"rope.rotary_dim={turned} exceeds the {head_size} channels of a head: "
                f"use {head_size - head_size % 2} or less"
            )
        pairs = turned // 2
        if self.sections is not None and sum(self.sections) != pairs:
            raise ValueError(
                f"rope.sections={self.sections} add up to {sum(self.sections)} pairs, and "
                f"{pairs} pairs of channels turn: make them add up to {pairs}"
            )
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != pairs:
                raise ValueError(
                    f"rope.{name} has {len(factors)} values, and {pairs} pairs of channels turn: "
                    f"give {pairs}"
                )

    def scalings(self) -> tuple[RopeScaling | None, RopeScaling | None]:
        """The rule in documents of at most `original_length` tokens, and that in longer ones."""
        if self.scaling == "longrope":
            assert self.short_factors is not None
            assert self.long_factors is not None
            assert self.original_length is not None
            short, long = (
                LongRopeScaling(
                    factors=factors,
                    extension=self.factor,
                    original_length=self.original_length,
                    given_attention_factor=self.attention_factor,
                )
                for factors in (self.short_factors, self.long_factors)
            )
            return short, long
        rule = self._one_rule()
        return rule, rule

    def _one_rule(self) -> RopeScaling | None:
        if self.scaling == "linear":
            return LinearScaling(factor=self.factor)
        if self.scaling == "llama3":
            assert self.low_freq_factor is not None
            assert self.high_freq_factor is not None
            assert self.original_length is not None
            return Llama3Scaling(
                factor=self.factor,
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
                original_length=self.original_length,
            )
        if self.scaling == "yarn":
            assert self.original_length is not None
            return YarnScaling(
                factor=self.factor,
                original_length=self.original_length,
                beta_fast=self.beta_fast,
                beta_slow=self.beta_slow,
                mscale=self.mscale,
                mscale_all_dim=self.mscale_all_dim,
                given_attention_factor=self.attention_factor,
                truncate=self.truncate,
            )
        return None


_SCALING_FIELDS = {
    **dict.fromkeys(("original_length", "low_freq_factor", "high_freq_factor")),
    **dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor")),
    **dict.fromkeys(("short_factors", "long_factors")),
    **{"factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
}
_NEEDED: dict[RopeScalingKind | None, tuple[str, ...]] = {
    None: (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": ("factor", "original_length"),
    "longrope": ("factor", "short_factors", "long_factors", "original_length"),
}
_OPTIONAL: dict[RopeScalingKind | None, tuple[str, ...]] = {
    None: (),
    "linear": (),
    "llama3": (),
    "yarn": (
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "longrope": ("attention_factor",),
}

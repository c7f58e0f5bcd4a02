"""The configuration of Mamba-2 mixers."""

import math
from dataclasses import dataclass

from mcore_models._checks import check_positive, nearest_divisors


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", 2024), pattern letter `M`.

    `num_heads` heads of `head_dim` channels, each with a state of `head_dim` x `state_size`;
    `num_groups` groups of heads share the input and output of the state (B and C). Heads of a group
    are neighbours, and the gated norm is over the channels of one group at a time. A causal
    convolution over `conv_width` tokens stands before the scan, with a bias if `conv_bias`;
    `projection_bias` gives the input and output projections one.

    The step size of a token is softplus(dt + bias), kept within `dt_min` and `dt_max` (None: no
    limit). Initially softplus(bias) is log-uniform between `dt_init_min` and `dt_init_max`, and the
    decay rate exp(a_log) uniform between `a_init_min` and `a_init_max`. The gate, silu(z), comes
    before the norm, or after it with `norm_before_gate`. `chunk_size` is how many tokens the scan
    takes at a time: it matters to speed and memory, not to the result.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_heads: int
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    projection_bias: bool = False
    norm_before_gate: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    dt_init_min: float = 0.001
    dt_init_max: float = 0.1
    a_init_min: float = 1.0
    a_init_max: float = 16.0
    chunk_size: int = 256

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "head_dim",
            "state_size",
            "num_groups",
            "conv_width",
            "chunk_size",
        ):
            check_positive(name, getattr(self, name))
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}: "
                f"use num_groups {nearest_divisors(self.num_heads, self.num_groups)}"
            )
        if not 0 <= self.dt_min <= self.dt_limits[1]:
            raise ValueError(
                f"dt_min={self.dt_min} and dt_max={self.dt_max} must rise from at least 0"
            )
        for name in ("dt_init", "a_init"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not 0 < low <= high < math.inf:
                raise ValueError(
                    f"{name}_min={low} and {name}_max={high} must rise from more than 0, and be "
                    f"finite"
                )

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def dt_limits(self) -> tuple[float, float]:
        """Least and largest step size, infinity without a limit."""
        return self.dt_min, math.inf if self.dt_max is None else self.dt_max

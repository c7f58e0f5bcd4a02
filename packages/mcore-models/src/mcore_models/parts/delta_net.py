"""The configuration of the gated delta net."""

import math
from dataclasses import dataclass

from mcore_models._checks import check_positive, nearest_divisors


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig:
    """A gated delta net (Yang et al., "Gated Delta Networks", 2024), pattern letter `G`.

    `num_value_heads` heads, each with a state of `key_head_dim` x `value_head_dim`; `num_key_heads`
    queries and keys, each shared by neighbouring value heads. A causal convolution over
    `conv_width` tokens stands before the recurrence; queries and keys then get length 1.

    What a head keeps of its state from a token to the next is exp(-exp(a_log) · softplus(α +
    dt_bias)), with α of the token. Initially softplus(dt_bias) is log-uniform between `dt_init_min`
    and `dt_init_max`, and exp(a_log) uniform between `a_init_min` and `a_init_max`. Outputs are
    normed head by head and then multiplied by silu(z). `chunk_size` is how many tokens the
    recurrence takes at a time: it matters to speed and memory, not to the result.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_width: int = 4
    dt_init_min: float = 0.001
    dt_init_max: float = 0.1
    a_init_min: float = 0.01
    a_init_max: float = 16.0
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_width",
            "chunk_size",
        ):
            check_positive(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}: use num_key_heads "
                f"{nearest_divisors(self.num_value_heads, self.num_key_heads)}"
            )
        for name in ("dt_init", "a_init"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not 0 < low <= high < math.inf:
                raise ValueError(
                    f"{name}_min={low} and {name}_max={high} must rise from more than 0, and be "
                    f"finite"
                )

    @property
    def key_size(self) -> int:
        """Channels of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

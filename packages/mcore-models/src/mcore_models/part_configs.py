"""The parts of a layer that have a configuration of their own, below `ModelConfig`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_models._checks import check_choice, check_positive, nearest_divisors

BalanceScope = Literal["sequence", "micro_batch"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP (Shazeer et al., 2017), pattern letter `E`.

    The router scores every expert by a softmax over all `num_experts` and takes the `top_k` best;
    an expert is an MLP of inner width `expert_ffn_size` with the model's activation. A token's
    output is the sum of its experts' outputs weighted by their scores. With `normalise_top_k` the
    chosen scores are divided by their sum, which is the same as taking the softmax after the
    choice, over the chosen logits alone (Mixtral, Qwen3); without it they stay as they are, shares
    of the softmax before the choice (Switch).

    `aux_loss_coefficient` weighs the load-balancing loss (Fedus et al., "Switch Transformers",
    2021): E · Σ_e f_e · P_e, with f_e the share of choices that fell on expert e and P_e its mean
    score; 1 when balanced. f and P are taken over each document (`"sequence"`: the loss does not
    depend on what a document is batched or packed with) or over each micro-batch of a replica
    (`"micro_batch"`). Tokens weigh as in the loss mask. 0 turns it off.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_experts: int
    top_k: int
    expert_ffn_size: int
    normalise_top_k: bool = True
    aux_loss_coefficient: float = 0.01
    aux_loss_scope: BalanceScope = "sequence"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_ffn_size"):
            check_positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} exceeds num_experts={self.num_experts}: "
                f"use top_k {self.num_experts} or less"
            )
        if self.normalise_top_k and self.top_k == 1 < self.num_experts:
            raise ValueError(
                "normalise_top_k with top_k=1 weighs every choice by 1, and the router never "
                "learns from the loss: use normalise_top_k=False, or top_k 2 or more"
            )
        if not 0 <= self.aux_loss_coefficient < math.inf:
            raise ValueError(
                f"aux_loss_coefficient={self.aux_loss_coefficient} must be at least 0 and finite"
            )
        check_choice("aux_loss_scope", self.aux_loss_scope, get_args(BalanceScope))


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

"""The parts of a layer that have a configuration of their own, below `ModelConfig`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_models._checks import check_choice, check_positive

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

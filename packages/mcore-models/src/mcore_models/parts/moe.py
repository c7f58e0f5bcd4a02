"""The configuration of mixtures of experts."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mcore_models._checks import check_choice, check_positive, nearest_divisors

BalanceScope = Literal["sequence", "micro_batch", "global"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus"]
ExpertChoice = Literal["top_k", "sinkhorn", "balanced"]
CapacityScope = Literal["sequence", "micro_batch"]
DropPolicy = Literal["probability", "position"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP (Shazeer et al., 2017), pattern letter `E`.

    An expert is an MLP of inner width `expert_ffn_size` with the model's activation. The router
    scores every token for all `num_experts` by `score_function` of its logits ("softmax" is over
    the experts) and takes the `top_k` best; a token's output is the sum of its experts' outputs
    weighted by their scores. With `normalise_top_k` the chosen scores are divided by their sum,
    which for a softmax is the same as taking it after the choice, over the chosen logits alone
    (Mixtral, Qwen3); without it they stay as they are, shares of the softmax before the choice
    (Switch). Weights are multiplied by `scaling_factor` in the end. `router_bias` gives the logits
    a trained bias.

    With `num_groups` experts are in groups of neighbours, and only those of the `top_groups` best
    are chosen from; a group is as good as the sum of its `group_score_experts` best scores (1 in
    DeepSeek-V2, 2 in DeepSeek-V3). `correction_rate` adds to the scores, for choosing only, a
    correction of each expert, which after each step rises by that rate where fewer tokens than the
    mean chose it and falls where more did (Wang et al., "Auxiliary-Loss-Free Load Balancing
    Strategy", 2024); 0 keeps it as it is, None is without.

    `expert_choice` "sinkhorn" balances the scores of a micro-batch of a replica by Sinkhorn's
    algorithm before choosing, in training (Clark et al., "Unified Scaling Laws for Routed Language
    Models", 2022); "balanced" deals tokens out in turn whatever the scores, to measure speed.
    `jitter` multiplies in training what the router sees by numbers between 1 - jitter and
    1 + jitter.

    `aux_loss_coefficient` weighs the load-balancing loss (Fedus et al., "Switch Transformers",
    2021): E · Σ_e f_e · P_e, with f_e the share of choices that fell on expert e and P_e its mean
    score, as a share of the token's scores; 1 when balanced. f and P are taken over each document
    (`"sequence"`: the loss does not depend on what a document is batched or packed with), over each
    micro-batch of a replica (`"micro_batch"`), or `"global"`: P over the global batch and f over
    the one before, since that of this one is not known before its end. Several scopes are given
    with as many coefficients. `z_loss_coefficient` weighs the mean of logsumexp(logits)² (Zoph et
    al., "ST-MoE", 2022). Tokens weigh as in the loss mask. 0 turns a loss off.

    `capacity_factor` limits in training what an expert takes of each document, or of each
    micro-batch of a replica (`capacity_scope`): ceil(factor · tokens · top_k / num_experts),
    counted over tokens in the loss mask. Of those that choose it those with the highest scores are
    kept, or the first (`drop_policy`); the others get nothing from it. Tokens outside of the loss
    mask have what room is left. `pad_to_capacity` gives every expert as many rows as it could get.
    How documents are cut over ranks does not matter to any of this.

    `shared_ffn_size` is the width of an MLP beside the experts that every token passes, with
    `shared_gate` multiplied by the sigmoid of one number of each token. `latent_size` is the width
    at which experts work, between two projections. `expert_bias`, unless it is None, says whether
    the projections of experts have biases, in place of the model's `mlp_bias`.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_experts: int
    top_k: int
    expert_ffn_size: int
    score_function: ScoreFunction = "softmax"
    normalise_top_k: bool = True
    scaling_factor: float = 1.0
    router_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score_experts: int = 1
    correction_rate: float | None = None
    expert_choice: ExpertChoice = "top_k"
    jitter: float = 0.0
    aux_loss_coefficient: float | tuple[float, ...] = 0.01
    aux_loss_scope: BalanceScope | tuple[BalanceScope, ...] = "sequence"
    z_loss_coefficient: float = 0.0
    capacity_factor: float | None = None
    capacity_scope: CapacityScope = "sequence"
    drop_policy: DropPolicy = "probability"
    pad_to_capacity: bool = False
    shared_ffn_size: int = 0
    shared_gate: bool = False
    latent_size: int | None = None
    expert_bias: bool | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "expert_ffn_size", "num_groups", "top_groups"):
            check_positive(name, getattr(self, name))
        for name, kind in _MOE_CHOICES.items():
            check_choice(name, getattr(self, name), get_args(kind))
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
        self._check_groups()
        self._check_balance()
        self._check_parts()
        self._check_numbers()

    @property
    def balance_losses(self) -> tuple[tuple[BalanceScope, float], ...]:
        """The load-balancing losses that are on: scope and coefficient of each."""
        scopes, coefficients = self.aux_loss_scope, self.aux_loss_coefficient
        if not isinstance(scopes, tuple):
            scopes = (scopes,)
        if not isinstance(coefficients, tuple):
            coefficients = (coefficients,)
        pairs = zip(scopes, coefficients, strict=True)
        return tuple((scope, coefficient) for scope, coefficient in pairs if coefficient)

    @property
    def keeps_load(self) -> bool:
        """Whether routers remember how the last global batch was spread over experts."""
        return any(scope == "global" for scope, _ in self.balance_losses)

    def _check_groups(self) -> None:
        experts, groups, best = self.num_experts, self.num_groups, self.group_score_experts
        if experts % groups:
            raise ValueError(
                f"num_experts={experts} cannot be divided into num_groups={groups}: "
                f"use num_groups {nearest_divisors(experts, groups)}"
            )
        if self.top_groups > groups:
            raise ValueError(
                f"top_groups={self.top_groups} exceeds num_groups={groups}: use {groups} or less"
            )
        size = experts // groups
        if not 1 <= best <= size:
            raise ValueError(
                f"group_score_experts={best} of groups of {size} experts: use 1 to {size}"
            )
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"top_k={self.top_k} exceeds the {self.top_groups * size} experts of "
                f"top_groups={self.top_groups}: use top_k {self.top_groups * size} or less"
            )

    def _check_balance(self) -> None:
        for name in ("aux_loss_coefficient", "aux_loss_scope"):
            if isinstance(getattr(self, name), list):  # as it is read from a file
                object.__setattr__(self, name, tuple(getattr(self, name)))
        scopes, coefficients = self.aux_loss_scope, self.aux_loss_coefficient
        scopes = scopes if isinstance(scopes, tuple) else (scopes,)
        coefficients = coefficients if isinstance(coefficients, tuple) else (coefficients,)
        for scope in scopes:
            check_choice("aux_loss_scope", scope, get_args(BalanceScope))
        if len(scopes) != len(coefficients) or len(set(scopes)) != len(scopes) or not scopes:
            raise ValueError(
                f"aux_loss_scope names {', '.join(scopes) or 'nothing'} and aux_loss_coefficient "
                f"has {len(coefficients)} values: give different scopes, one coefficient for each"
            )
        for value in (*coefficients, self.z_loss_coefficient):
            if not 0 <= value < math.inf:
                name = "aux_loss_coefficient" if value in coefficients else "z_loss_coefficient"
                raise ValueError(f"{name}={value} must be at least 0 and finite")

    def _check_parts(self) -> None:
        if self.shared_ffn_size != 0:
            check_positive("shared_ffn_size", self.shared_ffn_size)
        elif self.shared_gate:
            raise ValueError("shared_gate without shared experts: give shared_ffn_size")
        if self.latent_size is not None:
            check_positive("latent_size", self.latent_size)
        if self.expert_choice == "balanced" and (self.num_groups > 1 or self.correction_rate):
            raise ValueError(
                "expert_choice='balanced' looks at no score: leave out num_groups and "
                "correction_rate"
            )
        if self.pad_to_capacity and self.capacity_factor is None:
            raise ValueError("pad_to_capacity without a capacity: give capacity_factor")

    def _check_numbers(self) -> None:
        for name in ("scaling_factor", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be greater than 0 and finite")
        if self.correction_rate is not None and not 0 <= self.correction_rate < math.inf:
            raise ValueError(
                f"correction_rate={self.correction_rate} must be at least 0 and finite"
            )
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter} must be at least 0 and less than 1")


TRAINING_FIELDS = (
    *("aux_loss_coefficient", "aux_loss_scope", "z_loss_coefficient"),
    *("correction_rate", "jitter"),
    *("capacity_factor", "capacity_scope", "drop_policy", "pad_to_capacity"),
)
"""Fields of `MoEConfig` that matter to training alone, and may change in its course."""

_MOE_CHOICES = {
    "score_function": ScoreFunction,
    "expert_choice": ExpertChoice,
    "capacity_scope": CapacityScope,
    "drop_policy": DropPolicy,
}

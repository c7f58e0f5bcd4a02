"""Policy losses: typed inputs, and sums that the caller divides by counts of the global batch.

Sums, because a mean over a micro-batch would depend on how the batch is cut: a loss and its
gradient are the same for every size of micro-batch, over data-parallel ranks and in one process.

T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLossInput:
    """What a policy loss sees of a micro-batch, each [T] float32.

    Attributes:
        log_probs: ln π(token) under the policy in training; the gradient flows into it.
        behaviour: ln of the probability with which the engine drew the token, taken by the same
            rule as `log_probs` (see `LogProbs`).
        advantages: how much better than expected the token's rollout did.
        mask: 1 where the token is the policy's own, 0 at prompts, observations and padding. What
            the other tensors hold there is not read.
        lengths: the number of the policy's own tokens in the sequence that the token belongs to.
        reference: ln π(token) under the reference policy, for a loss that needs it.
    """

    log_probs: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    lengths: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLossOutput:
    """What a policy loss makes of a micro-batch.

    `total` is a scalar sum to be divided by the loss's `denominator`, `sums` are detached scalar
    sums over the policy's own tokens to be divided by `PolicyCounts.tokens`.
    """

    total: Tensor
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PolicyCounts:
    """Totals over the global batch: the policy's own tokens, and the sequences.

    `max_tokens` is the most tokens that the policy may write in a sequence.
    """

    tokens: float | Tensor
    sequences: int
    max_tokens: int


class PolicyLoss(Protocol):
    """A loss as the step uses it."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of `PolicyLossOutput.sums`."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether `PolicyLossInput.reference` is read."""
        ...

    def denominator(self, counts: PolicyCounts) -> float | Tensor:
        """Return what the totals of all micro-batches are divided by."""
        ...

    def __call__(self, inputs: PolicyLossInput) -> PolicyLossOutput:
        """Return the sums over one micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """The clipped policy gradient on group advantages (Shao et al., "DeepSeekMath", 2024).

    With the ratio r = π(token) / behaviour(token) and the advantage A, a token costs
    −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl_coefficient·KL, where KL is the estimate
    ρ − ln ρ − 1 with ρ = reference / π (Schulman's k3: never negative, unbiased).

    Attributes:
        clip_low, clip_high: how far the ratio may fall and rise before the gradient ends.
        kl_coefficient: weight of the distance to the reference policy, the one that the run started
            from; 0 needs no reference.
        aggregation: `token` is the mean over all of the policy's tokens (Yu et al., "DAPO", 2025);
            `sequence` the mean over sequences of the mean over each one's tokens (as first
            published); `constant` the sum over tokens divided by sequences times the most tokens
            that one may have (Liu et al., "Dr. GRPO", 2025).

    Raises:
        ValueError: a value is out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    aggregation: Aggregation = "token"

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low={self.clip_low} must lie in 0 < clip_low <= 1")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high={self.clip_high} must be greater than 0")
        if not 0 <= self.kl_coefficient < float("inf"):
            raise ValueError(f"kl_coefficient={self.kl_coefficient} must be at least 0 and finite")
        if self.aggregation not in get_args(Aggregation):
            names = ", ".join(get_args(Aggregation))
            raise ValueError(f"aggregation={self.aggregation!r} is none of {names}")

    @property
    def needs_reference(self) -> bool:
        """Whether there is a distance to a reference policy in it."""
        return self.kl_coefficient > 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """`clip_fraction`: tokens whose gradient the clipping ends.

        `kl`: distance from the policy that drew the tokens to the one in training;
        `kl_reference`: from the one in training to the reference. Both are k3.
        """
        return ("clip_fraction", "kl", *(["kl_reference"] if self.needs_reference else []))

    def denominator(self, counts: PolicyCounts) -> float | Tensor:
        """Return the number of tokens, of sequences, or of tokens that there could be at most."""
        if self.aggregation == "token":
            return counts.tokens
        return counts.sequences * (counts.max_tokens if self.aggregation == "constant" else 1)

    def __call__(self, inputs: PolicyLossInput) -> PolicyLossOutput:
        """Return the sums over one micro-batch."""
        own = inputs.mask != 0
        # Chosen, not multiplied by zero: what prompts hold may be infinite.
        log_ratio = (inputs.log_probs - inputs.behaviour).masked_fill(~own, 0.0)
        advantages = inputs.advantages.masked_fill(~own, 0.0)
        ratio = log_ratio.exp()
        free = ratio * advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages
        losses = -torch.minimum(free, clipped)
        sums = {
            "clip_fraction": (clipped < free).sum(),
            "kl": _k3(log_ratio.detach()).sum(),
        }
        if self.needs_reference:
            assert inputs.reference is not None, "the step gives a reference to losses that need it"
            distance = _k3((inputs.reference - inputs.log_probs).masked_fill(~own, 0.0))
            losses = losses + self.kl_coefficient * distance
            sums["kl_reference"] = distance.detach().sum()
        if self.aggregation == "sequence":
            losses = losses / inputs.lengths.clamp(min=1)
        return PolicyLossOutput(total=losses.sum(), sums=sums)


def _k3(log_ratio: Tensor) -> Tensor:
    """Return ρ − ln ρ − 1 [T] of ln ρ, exactly 0 at 0 and without cancellation around it."""
    return log_ratio.expm1() - log_ratio

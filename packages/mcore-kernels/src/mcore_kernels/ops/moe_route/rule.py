"""How a router chooses experts, as a value; and what is done to its logits besides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mcore_kernels.custom_ops import OpLibrary

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """The rule of one router (Megatron's and DeepSeek's, arXiv:2401.06066 and 2412.19437).

    Attributes:
        top_k: experts per token.
        score: function of the logits: "softmax" over all experts, "sigmoid" or "sqrt_softplus" of
            each.
        normalise: the weights of a token are divided by their sum.
        scale: factor on the weights.
        num_groups, top_groups: experts lie in so many groups of equal size, and only those of the
            best `top_groups` can be chosen; 1 and 1: no groups.
        per_group: a group is as good as the sum of its so many best scores (with the correction);
            None: top_k // top_groups of them.
        float64: scores and weights are computed in float64.

    Raises:
        ValueError: a number that cannot be.
    """

    top_k: int
    score: Score = "softmax"
    normalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    per_group: int | None = None
    float64: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"routing: top_k must be at least 1, got {self.top_k}")
        if self.score not in get_args(Score):
            raise ValueError(
                f"routing: score is one of {', '.join(get_args(Score))}; got {self.score!r}"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"routing: top_groups must be between 1 and num_groups, got {self.top_groups} of "
                f"{self.num_groups}"
            )
        if self.per_group is not None and self.per_group < 1:
            raise ValueError(f"routing: per_group must be at least 1, got {self.per_group}")
        if not math.isfinite(self.scale):
            raise ValueError(f"routing: scale must be a finite number, got {self.scale}")

    @property
    def best_of_group(self) -> int:
        """How many scores say how good a group is."""
        return self.per_group or max(1, self.top_k // self.top_groups)

    def check(self, num_experts: int) -> None:
        """ValueError unless so many experts can be chosen from by this rule."""
        if num_experts % self.num_groups:
            raise ValueError(
                f"routing: {num_experts} experts do not fall into {self.num_groups} equal groups"
            )
        size = num_experts // self.num_groups
        if self.top_k > size * self.top_groups:
            raise ValueError(
                f"routing: top_k {self.top_k} of {size * self.top_groups} experts that can be "
                f"chosen ({self.top_groups} of {self.num_groups} groups of {size})"
            )
        if self.best_of_group > size:
            raise ValueError(
                f"routing: per_group {self.best_of_group} is more than the {size} experts of a "
                "group"
            )


def sinkhorn(logits: Tensor, *, tolerance: float = 1e-4, most: int = 1000) -> Tensor:
    """Return logits [T, E] as a plan that loads every expert alike: rows and columns even out.

    exp(logits) is scaled by rows to 1/T and by columns to 1/E, in turns, until the columns'
    factors change by less than `tolerance` on average, or `most` times (Clark et al. 2022,
    arXiv:2202.01169). Choose by it; take weights from the logits. No gradient flows.
    """
    plan: Tensor = _sinkhorn_op(logits.detach(), tolerance, most)
    return plan


def _sinkhorn(logits: Tensor, tolerance: float, most: int) -> Tensor:
    with torch.no_grad():
        wide = torch.promote_types(logits.dtype, torch.float32)
        # A factor per row changes nothing in the end, and keeps exp from overflowing.
        cost = (logits.to(wide) - logits.to(wide).amax(-1, keepdim=True)).exp()
        tokens, experts = cost.shape
        column, tiny = cost.new_ones(experts), torch.finfo(wide).tiny
        row = cost.new_ones(tokens)
        for _ in range(most if tokens else 0):
            row = 1.0 / (tokens * (cost @ column)).clamp_min(tiny)
            new = 1.0 / (experts * (row @ cost)).clamp_min(tiny)
            change = ((new - column).abs() / new).mean()
            column = new
            if float(change) < tolerance:
                break
        return row.unsqueeze(1) * cost * column


def _sinkhorn_fake(logits: Tensor, tolerance: float, most: int) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


_LIBRARY = OpLibrary()
_sinkhorn_op = _LIBRARY.when_compiled(
    "sinkhorn(Tensor logits, float tolerance, int most) -> Tensor", _sinkhorn, fake=_sinkhorn_fake
)


def jitter(x: Tensor, epsilon: float, generator: torch.Generator | None = None) -> Tensor:
    """Return the router's input times noise, uniform between 1 - ε and 1 + ε for each element.

    Raises:
        ValueError: ε is outside [0, 1).
    """
    if not 0.0 <= epsilon < 1.0:
        raise ValueError(f"routing: the noise's epsilon must be in [0, 1), got {epsilon}")
    noise = torch.empty_like(x, requires_grad=False)
    return x * noise.uniform_(1.0 - epsilon, 1.0 + epsilon, generator=generator)

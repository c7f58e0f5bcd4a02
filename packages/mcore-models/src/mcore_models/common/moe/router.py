"""The router. N tokens of this rank, E experts, k chosen for each token, H hidden."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_kernels import RoutingRule
from mcore_kernels.protocols import MoeRouteOp
from mcore_models.common.builder import BuildContext
from mcore_models.common.moe.choice import (
    group_scores,
    in_turn,
    scores_of,
    sinkhorn,
    within_groups,
)
from mcore_models.common.moe.tokens import RoutedTokens
from mcore_models.config import ModelConfig
from mcore_models.parts import MoEConfig
from mcore_parallel import GradSync, Init, ParamSpec, RngKey, TensorLayout, counter_uniform


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where N tokens go.

    logits, scores: [N, E], fp32. experts: those chosen [N, k] int64, best first. weights: by which
    their outputs are multiplied [N, k], fp32. ranking: computes what they were chosen by; None
    where the scores did not matter.
    """

    logits: Tensor
    scores: Tensor
    experts: Tensor
    weights: Tensor
    ranking: "Callable[[], Ranking] | None" = None

    def margin(self) -> float:
        """The least difference between what was chosen, an expert or a group, and what was not.

        In scores, or what else they were chosen by. Rounding below it changes no choice; infinite
        where there was nothing to choose.
        """
        if self.ranking is None:
            return math.inf
        ranking = self.ranking()
        margins = [_lead(ranking.experts, self.experts.shape[1])]
        if ranking.groups is not None:
            margins.append(_lead(ranking.groups, ranking.top_groups))
        return min(margins)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """What experts are chosen by [N, E], minus infinity where one is out of the question.

    groups: what groups of experts are chosen by [N, G]; None without. top_groups: how many.
    """

    experts: Tensor
    groups: Tensor | None = None
    top_groups: int = 1


class Replay(Protocol):
    """Something that takes or gives the choices of routers (see `replay`)."""

    def __call__(self, layer: int, tokens: RoutedTokens, experts: Tensor, /) -> Tensor:
        """Return what to take in place of the router's own choice `experts` [N, k]."""


class Router(nn.Module):
    """Scores every token for every expert and chooses the k best (see `MoEConfig`).

    Weight, logits and scores are fp32 also in a 16-bit model, where rounding would change choices.
    Every rank of the tensor-parallel group routes tokens of its own, so that its gradient is a
    share of the sum over that group.

    `correction` [E], where there is one, is added to the scores for choosing; `load` [E] is how the
    choices of the last global batch were spread. Both have no gradient: `adapt_routers` changes
    them.
    """

    correction: nn.Parameter | None
    load: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, moe: MoEConfig, build: BuildContext, layer_index: int
    ) -> None:
        super().__init__()
        self.moe = moe
        self.layer_index = layer_index
        self.replay: Replay | None = None
        self._route: MoeRouteOp = build.kernels.moe_route
        self._rule = _rule_of(moe)
        self._group = build.tp
        self._init = Init(kind="normal", std=config.init_std)
        self._dtype = torch.promote_types(build.dtype, torch.float32)
        size = (moe.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size, dtype=self._dtype, device=build.device))
        self.bias = self._vector(build, moe.router_bias, trained=True)
        self.correction = self._vector(build, moe.correction_rate is not None)
        self.load = self._vector(build, moe.keeps_load)

    def _vector(
        self, build: BuildContext, present: bool, *, trained: bool = False
    ) -> nn.Parameter | None:
        if not present:
            return None
        zeros = torch.zeros(self.moe.num_experts, dtype=self._dtype, device=build.device)
        return nn.Parameter(zeros, requires_grad=trained)

    def forward(self, x: Tensor, tokens: RoutedTokens | None = None) -> Routing:
        """Route x [N, H]. `tokens` says more of them, for choices that depend on it."""
        moe = self.moe
        x = x.to(self.weight.dtype)
        if moe.jitter and tokens is not None and tokens.training:
            x = self._jittered(x, tokens)
        logits = F.linear(x, self.weight, self.bias)
        if self._rule is not None and self.replay is None:
            weights, experts, scores = self._route(logits, self.correction, rule=self._rule)
            plain = logits.detach(), scores.detach()
            return Routing(
                logits=logits,
                scores=scores,
                experts=experts,
                weights=weights,
                ranking=partial(self._ranking, *plain),
            )
        scores = scores_of(logits, moe.score_function)
        routing = self._choose(logits.detach(), scores.detach(), tokens)
        experts = routing.experts
        if self.replay is not None and tokens is not None:
            experts = self._checked(self.replay(self.layer_index, tokens, experts), experts)
        weights = self._weights(logits, scores, experts)
        return replace(routing, logits=logits, scores=scores, experts=experts, weights=weights)

    def _choose(self, logits: Tensor, scores: Tensor, tokens: RoutedTokens | None) -> Routing:
        """The routing but for its weights."""
        moe = self.moe
        if moe.expert_choice == "balanced":
            rows = torch.arange(len(scores), device=scores.device)
            experts = in_turn(rows if tokens is None else tokens.rows(), moe)
            return Routing(logits=logits, scores=scores, experts=experts, weights=scores)
        ranking = self._ranking(logits, scores, tokens)
        # Where nothing else matters, by the logits: scores that are rounded may be equal.
        decisive = logits if ranking.experts is scores else ranking.experts
        return Routing(
            logits=logits,
            scores=scores,
            experts=decisive.topk(moe.top_k, dim=-1).indices,
            weights=scores,
            ranking=lambda: ranking,
        )

    def _ranking(
        self, logits: Tensor, scores: Tensor, tokens: RoutedTokens | None = None
    ) -> Ranking:
        moe, ranking, groups = self.moe, scores, None
        if moe.expert_choice == "sinkhorn" and tokens is not None and tokens.training:
            ranking = sinkhorn(logits, tokens)
        if self.correction is not None:
            ranking = ranking + self.correction
        if moe.num_groups > 1:
            groups = group_scores(ranking, moe)
            ranking = within_groups(ranking, groups, moe)
        return Ranking(experts=ranking, groups=groups, top_groups=moe.top_groups)

    def _checked(self, given: Tensor, own: Tensor) -> Tensor:
        """The choices given in place of the router's own; ValueError when it cannot make them."""
        if given is own:
            return own
        if given.shape != own.shape:
            raise ValueError(
                f"layer {self.layer_index} is given choices of {given.shape[-1]} experts for each "
                f"of {given.shape[0]} tokens, and chooses {own.shape[1]} for each of {own.shape[0]}"
            )
        most = int(given.max()) if given.numel() else 0
        if most >= self.moe.num_experts:
            raise ValueError(
                f"layer {self.layer_index} is given a choice of expert {most}, and has "
                f"{self.moe.num_experts} experts: 0 to {self.moe.num_experts - 1}"
            )
        return given

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        moe = self.moe
        if not moe.normalise_top_k:
            weights = scores.gather(-1, experts)
        elif moe.score_function == "softmax":
            # Softmax over the chosen logits is their scores divided by the sum of these.
            weights = logits.gather(-1, experts).softmax(-1)
        else:
            chosen = scores.gather(-1, experts)
            weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return weights * moe.scaling_factor if moe.scaling_factor != 1 else weights

    def _jittered(self, x: Tensor, tokens: RoutedTokens) -> Tensor:
        if tokens.key is None:
            raise ValueError(
                f"jitter={self.moe.jitter} in training mode needs rng=RngKey(…); "
                f"call eval() to run without jitter"
            )
        columns = torch.arange(x.shape[1], device=x.device)
        index = tokens.rows().unsqueeze(-1) * x.shape[1] + columns
        share = counter_uniform(_place(tokens.key, self.layer_index), index)
        return x * (1 + self.moe.jitter * (2 * share.to(x.dtype) - 1))

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `weight` [E, H] and of what else there is, all whole on every rank."""
        group = self._group
        specs = {}
        for name, parameter in self.named_parameters(recurse=False):
            layout = TensorLayout.whole(f"{prefix}.{name}", tuple(parameter.shape))
            summed = group.size > 1 and parameter.requires_grad
            specs[name] = ParamSpec(
                layout=layout.replicated(group.rank, group.size),
                init=self._init if name == "weight" else Init(kind="zeros"),
                grad_sync=(GradSync(group=group),) if summed else (),
                fp32=True,
            )
        return specs


def _rule_of(moe: MoEConfig) -> RoutingRule | None:
    """What the kernel makes of logits; None where it cannot.

    Roots of softplus have no gradient where it underflows, which is looked after here alone.
    """
    if moe.expert_choice != "top_k" or moe.score_function == "sqrt_softplus":
        return None
    return RoutingRule(
        top_k=moe.top_k,
        score=moe.score_function,
        normalise=moe.normalise_top_k,
        scale=moe.scaling_factor,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        per_group=moe.group_score_experts,
    )


def _place(key: RngKey, layer_index: int) -> RngKey:
    return key.fold("jitter", layer_index)


def _lead(values: Tensor, chosen: int) -> float:
    """By how much the `chosen` best of each row lead, at least; infinite where all are chosen."""
    if not len(values) or chosen == values.shape[1]:
        return math.inf
    best = values.topk(chosen + 1, dim=-1).values
    return float((best[:, -2] - best[:, -1]).min())

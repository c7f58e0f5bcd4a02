"""The router in plain torch. Shapes: T tokens, E experts, k chosen, G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_kernels.ops.moe_route.rule import RoutingRule
from mcore_kernels.protocols import accumulation_dtype


def moe_route(
    logits: Tensor, correction: Tensor | None = None, *, rule: RoutingRule
) -> tuple[Tensor, Tensor, Tensor]:
    """See `mcore_kernels.protocols.MoeRouteOp`; ValueError where the rule does not fit E."""
    rule.check(logits.shape[-1])
    wide = logits.to(torch.float64 if rule.float64 else accumulation_dtype(logits.dtype))
    scores = _scores(wide, rule)
    with torch.no_grad():
        experts = choose(wide, scores, correction, rule)
    if rule.score == "softmax" and rule.normalise:
        # The quotients without the scores, which may all have rounded to 0.
        weights = wide.gather(-1, experts).softmax(-1)
    else:
        weights = scores.gather(-1, experts)
        if rule.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scale if rule.scale != 1.0 else weights, experts, scores


def _scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    if rule.score == "softmax":
        return logits.softmax(-1)
    if rule.score == "sigmoid":
        return logits.sigmoid()
    softplus = F.softplus(logits)
    # Far below 0 it rounds to 0, where the root has no slope; that of the score is 0.
    vanished = softplus == 0
    return torch.where(vanished, 0.0, torch.where(vanished, 1.0, softplus).sqrt())


def choose(logits: Tensor, scores: Tensor, correction: Tensor | None, rule: RoutingRule) -> Tensor:
    """The k experts [T, k] with the best scores, equal ones by the lowest number."""
    if correction is None and rule.num_groups == 1:
        # Scores rise with the logits, but may round to equal ones.
        return _first_largest(logits, rule.top_k)
    values = scores if correction is None else scores + correction.to(scores.dtype)
    if rule.num_groups > 1:
        size = values.shape[-1] // rule.num_groups
        grouped = values.view(*values.shape[:-1], rule.num_groups, size)
        quality = grouped.topk(rule.best_of_group, dim=-1).values.sum(-1)
        best = _first_largest(quality, rule.top_groups)
        allowed = torch.zeros_like(quality, dtype=torch.bool).scatter_(-1, best, True)
        values = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return _first_largest(values, rule.top_k)


def _first_largest(values: Tensor, count: int) -> Tensor:
    # topk promises nothing about equal values; a stable sort keeps the lowest number first. A GPU
    # sorts by bits, so that a NaN with a sign, as a CPU rounds it to bfloat16, would come last.
    values = torch.where(values.isnan(), torch.nan, values)
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]

"""From a router's logits to scores and choices. N tokens, E experts, G groups of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_models.common.moe.tokens import RoutedTokens
from mcore_models.parts import MoEConfig, ScoreFunction

_SINKHORN_ROUNDS = 20


def scores_of(logits: Tensor, function: ScoreFunction) -> Tensor:
    """The scores [N, E], each at least 0."""
    if function == "softmax":
        return logits.softmax(-1)
    if function == "sigmoid":
        return logits.sigmoid()
    # The root of 0 has no gradient: where softplus underflows, that of the logit is 0 and not NaN.
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def shares_of(scores: Tensor, function: ScoreFunction) -> Tensor:
    """Each token's scores as shares of their sum: a distribution over the experts."""
    if function == "softmax":
        return scores
    return scores / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def group_scores(scores: Tensor, moe: MoEConfig) -> Tensor:
    """How good each group is [N, G]: the sum of its best scores."""
    grouped = scores.view(len(scores), moe.num_groups, scores.shape[1] // moe.num_groups)
    return grouped.topk(moe.group_score_experts, dim=-1).values.sum(-1)


def within_groups(scores: Tensor, groups: Tensor, moe: MoEConfig) -> Tensor:
    """The scores, minus infinity outside of each token's best groups."""
    best = groups.topk(moe.top_groups, dim=-1).indices
    outside = torch.ones_like(groups, dtype=torch.bool).scatter(-1, best, False)
    return scores.masked_fill(
        outside.repeat_interleave(scores.shape[1] // moe.num_groups, dim=-1), -torch.inf
    )


def sinkhorn(logits: Tensor, tokens: RoutedTokens) -> Tensor:
    """Scores [N, E] that add up to 1 for each token, and to as much for each expert.

    Alternately scales rows and columns of exp(logits) (Sinkhorn, 1964), a fixed number of times;
    over all tokens of the micro-batch of a replica, of which those count that are in the loss mask.
    Communicates over tp and cp.
    """
    costs = (logits - logits.amax(-1, keepdim=True)).exp()
    valid = (tokens.weights(costs.dtype) > 0).to(costs.dtype)
    scales, tiny = torch.ones_like(costs[0:1].sum(0)), torch.finfo(costs.dtype).tiny
    count = tokens.total(valid.sum()).clamp(min=1)
    for _ in range(_SINKHORN_ROUNDS):
        rows = valid / (costs @ scales).clamp(min=tiny) / count
        columns = tokens.total(rows @ costs)
        scales = torch.where(columns > 0, 1 / (logits.shape[1] * columns.clamp(min=tiny)), scales)
    balanced = costs * scales
    return balanced / balanced.sum(-1, keepdim=True).clamp(min=tiny)


def in_turn(rows: Tensor, moe: MoEConfig) -> Tensor:
    """Experts [N, k] dealt out in the order of the tokens' global numbers."""
    step = torch.arange(moe.top_k, device=rows.device)
    return (rows.unsqueeze(-1) * moe.top_k + step) % moe.num_experts

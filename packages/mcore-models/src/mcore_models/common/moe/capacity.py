"""What experts take at most, counted over all ranks that have parts of the same documents.

N tokens here, M of the micro-batch of a replica, k choices of each, E experts, D documents.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_models.common.moe.router import Routing
from mcore_models.common.moe.tokens import VALID, RoutedTokens
from mcore_models.parts import MoEConfig
from mcore_parallel import all_gather

_NOWHERE = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """Choices [N, k] of which some are -1, and what an expert may get of this micro-batch."""

    experts: Tensor
    capacity: Tensor


def keep_within_capacity(routing: Routing, tokens: RoutedTokens, moe: MoEConfig) -> Kept:
    """Drop the choices that their experts have no room for (see `MoEConfig`).

    All-gathers choices, scores and places of the tokens over tp and cp, so that what is kept does
    not depend on how they are cut.
    """
    keys = _keys(routing, tokens)
    size = -(-tokens.batch.num_tokens // tokens.tp.size)  # the largest of the shares
    padded = F.pad(keys, (0, 0, 0, size - len(keys)), value=_NOWHERE)
    everybody = all_gather(all_gather(padded, tokens.tp), tokens.cp)
    k, documents = moe.top_k, max(tokens.batch.num_documents, 1)
    experts, scores = everybody[:, :k].long(), everybody[:, k : 2 * k]
    document, position, worth = everybody[:, 2 * k :].unbind(-1)
    in_batch = moe.capacity_scope == "micro_batch"
    place = torch.zeros_like(document).long() if in_batch else document.clamp(min=0).long()
    count = (worth == VALID).double()
    counts = count.new_zeros(1 if in_batch else documents).index_add_(0, place, count)
    # A little less, lest rounding of the product makes room for one more.
    room = (moe.capacity_factor or 0.0) * counts * k / moe.num_experts
    capacity = (room - 1e-9).ceil().clamp(min=0)
    order = _in_order(scores, (position, document, worth), moe)
    group = place.unsqueeze(-1) * moe.num_experts + experts.clamp(min=0)
    group = group.masked_fill(experts < 0, len(capacity) * moe.num_experts).flatten()
    kept = _ranks(group, order) < capacity.index_select(0, place).repeat_interleave(k)
    start = (tokens.cp.rank * tokens.tp.size + tokens.tp.rank) * size
    mine = kept.view(-1, k)[start : start + len(keys)]
    return Kept(experts=routing.experts.masked_fill(~mine, _NOWHERE), capacity=capacity.sum())


def _keys(routing: Routing, tokens: RoutedTokens) -> Tensor:
    """What decides about my tokens [N, 2k + 3], fp64, which holds all of it exactly."""
    scores = routing.scores.detach().gather(-1, routing.experts)
    columns = [
        tokens.documents(),
        tokens.batch.positions[tokens.mine],
        tokens.worth(),
    ]
    parts = [routing.experts, scores, torch.stack([c.double() for c in columns], -1)]
    return torch.cat([part.double() for part in parts], -1)


def _in_order(scores: Tensor, keys: tuple[Tensor, Tensor, Tensor], moe: MoEConfig) -> Tensor:
    """All M · k choices from the first to be kept to the last: one index after another."""
    k = scores.shape[1]
    position, document, worth = (key.repeat_interleave(k) for key in keys)
    order = position.argsort(stable=True)
    order = order[document[order].argsort(stable=True)]
    if moe.drop_policy == "probability":
        order = order[scores.flatten()[order].argsort(stable=True, descending=True)]
    return order[worth[order].argsort(stable=True, descending=True)]


def _ranks(group: Tensor, order: Tensor) -> Tensor:
    """The place of each choice among those of its group, in the given order."""
    order = order[group[order].argsort(stable=True)]
    groups = group[order]
    place = torch.arange(len(order), device=order.device) - torch.searchsorted(groups, groups)
    return torch.empty_like(place).scatter_(0, order, place)

"""Losses of a router: load balance and the size of logits. N tokens here, E experts."""

import torch
from torch import Tensor

from mcore_models.common.moe.choice import shares_of
from mcore_models.common.moe.router import Routing
from mcore_models.common.moe.tokens import RoutedTokens
from mcore_models.parts import BalanceScope, MoEConfig

BALANCE_LOSS = "moe_balance_loss"
"""The name of the load-balancing loss, summed over all layers."""

Z_LOSS = "moe_z_loss"
"""The name of the loss on the size of logits, summed over all layers."""


def loss_names(moe: MoEConfig) -> dict[BalanceScope, str]:
    """The name of the load-balancing loss of each scope: with several it says which."""
    scopes = [scope for scope, _ in moe.balance_losses]
    if len(scopes) == 1:
        return {scopes[0]: BALANCE_LOSS}
    return {scope: f"{BALANCE_LOSS}_{scope}" for scope in scopes}


def auxiliary_names(moe: MoEConfig | None) -> tuple[str, ...]:
    """The names of all losses that layers with this config add."""
    if moe is None:
        return ()
    return (*loss_names(moe).values(), *((Z_LOSS,) if moe.z_loss_coefficient else ()))


def choices_of(routing: Routing, tokens: RoutedTokens) -> Tensor:
    """How many of my tokens chose each expert [E], fp64; a token counts as in the loss mask."""
    experts = routing.experts
    weights = tokens.weights(torch.float64).unsqueeze(-1).expand(experts.shape)
    choices = torch.zeros(routing.scores.shape[1], dtype=torch.float64, device=experts.device)
    return choices.index_add_(0, experts.flatten(), weights.flatten())


def balance_total(
    routing: Routing,
    tokens: RoutedTokens,
    moe: MoEConfig,
    scope: BalanceScope,
    load: Tensor | None = None,
) -> Tensor:
    """My tokens' part of Σ valid tokens · E · Σ_e f_e · P_e over what the scope says.

    Valid tokens times P_e is the sum of their scores, so that each token adds its own scores,
    weighted by E · f_e: the only sum over ranks that it takes is that of the choices. `load` [E]
    is f for the scope "global"; zeros stand for equal shares.
    """
    scores = shares_of(routing.scores, moe.score_function)
    valid = tokens.weights(scores.dtype)
    if scope == "global":
        assert load is not None, "a router with a global balance has it"
        shares = torch.where(load.sum() > 0, load, 1 / moe.num_experts)
        return (scores * shares * valid.unsqueeze(1)).sum() * moe.num_experts
    document, documents = torch.zeros_like(routing.experts[:, 0]), 1
    if scope == "sequence":
        document, documents = tokens.documents(), tokens.batch.num_documents
    chosen = torch.zeros_like(scores).scatter_(1, routing.experts, 1.0)
    choices = chosen.new_zeros(documents, chosen.shape[1])
    choices.index_add_(0, document, chosen * valid.unsqueeze(1))
    choices = tokens.total(choices)
    totals = choices.sum(1, keepdim=True)
    shares = choices / totals.masked_fill(totals == 0, 1.0)
    wanted = shares.index_select(0, document) * valid.unsqueeze(1)
    return (scores * wanted).sum() * moe.num_experts


def z_total(routing: Routing, tokens: RoutedTokens) -> Tensor:
    """My valid tokens' sum of logsumexp(logits)²."""
    size = routing.logits.logsumexp(-1)
    return (size.square() * tokens.weights(size.dtype)).sum()

"""The mixture of experts: router, experts, what balances them, and the layer that joins them."""

from mcore_models.common.moe.balance import BALANCE_LOSS, Z_LOSS, auxiliary_names
from mcore_models.common.moe.experts import Experts
from mcore_models.common.moe.layer import MoE, take_turns
from mcore_models.common.moe.load import ExpertLoads, adapt_routers, expert_loads
from mcore_models.common.moe.replay import RouterRecord, recorded, replayed
from mcore_models.common.moe.router import Router, Routing
from mcore_models.common.moe.tokens import RoutedTokens

__all__ = [
    "BALANCE_LOSS",
    "Z_LOSS",
    "ExpertLoads",
    "Experts",
    "MoE",
    "RoutedTokens",
    "Router",
    "RouterRecord",
    "Routing",
    "adapt_routers",
    "auxiliary_names",
    "expert_loads",
    "recorded",
    "replayed",
    "take_turns",
]

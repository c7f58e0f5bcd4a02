"""The public names of the package, in one place; `mcore_parallel.expert` passes them on."""

from mcore_parallel.expert.all_gather import AllGather
from mcore_parallel.expert.all_to_all import AllToAll
from mcore_parallel.expert.backends import (
    DISPATCHERS,
    check_dispatcher,
    dispatcher_factory,
    make_dispatcher,
)
from mcore_parallel.expert.conformance import DispatchCase, check_dispatch, dispatch_cases
from mcore_parallel.expert.dispatch import (
    Combining,
    Dispatched,
    Dispatcher,
    DispatcherFactory,
    Dispatching,
)
from mcore_parallel.expert.grouped import GroupedLinearOp, SequentialLinear, grouped_linear
from mcore_parallel.expert.linear import ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.expert.permute import PermuteOp, RowOrder, TorchPermute
from mcore_parallel.expert.share import join_shares, share_of, take_share
from mcore_parallel.expert.transit import Transit, start_exchange
from mcore_parallel.expert.turns import Steps, Turns, finish, in_turns

__all__ = [
    "DISPATCHERS",
    "AllGather",
    "AllToAll",
    "Combining",
    "DispatchCase",
    "Dispatched",
    "Dispatcher",
    "DispatcherFactory",
    "Dispatching",
    "ExpertColumnLinear",
    "ExpertRowLinear",
    "GroupedLinearOp",
    "PermuteOp",
    "RowOrder",
    "SequentialLinear",
    "Steps",
    "TorchPermute",
    "Transit",
    "Turns",
    "check_dispatch",
    "check_dispatcher",
    "dispatch_cases",
    "dispatcher_factory",
    "finish",
    "grouped_linear",
    "in_turns",
    "join_shares",
    "make_dispatcher",
    "share_of",
    "start_exchange",
    "take_share",
]

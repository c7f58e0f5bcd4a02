"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

Expert parameters live on the expert view of the mesh (etp × ep × edp): `ep` deals the experts
out, `etp` cuts each of them, and over `edp` they are copies whose gradients are summed. That sum is
complete when every rank of a pipeline stage routes tokens of its own: ranks of `dp` and `cp` do,
and ranks of `tp` do under sequence parallelism; without it `take_share` deals their tokens out.
"""

from mcore_parallel.expert.dispatch import AllToAll, Dispatched, Dispatcher
from mcore_parallel.expert.grouped import GroupedLinearOp, SequentialLinear, grouped_linear
from mcore_parallel.expert.linear import ExpertColumnLinear, ExpertRowLinear
from mcore_parallel.expert.share import join_shares, share_of, take_share

__all__ = [
    "AllToAll",
    "Dispatched",
    "Dispatcher",
    "ExpertColumnLinear",
    "ExpertRowLinear",
    "GroupedLinearOp",
    "SequentialLinear",
    "grouped_linear",
    "join_shares",
    "share_of",
    "take_share",
]

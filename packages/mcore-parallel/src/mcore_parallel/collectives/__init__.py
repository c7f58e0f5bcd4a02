"""Collectives over a `Group`: plain, into given buffers, and with gradients.

Three rules hold for all of them:
- over a group of size 1 they are the identity and return their input;
- over a larger one a result is new memory, and no input is written to: only the functions whose
  name ends in `_` or `_into` write, into the buffer they are given;
- every rank of the group calls the same functions in the same order with the same shapes, except
  where splits are passed. A rank can only check its own arguments; TORCH_DISTRIBUTED_DEBUG=DETAIL
  makes torch compare those of all ranks. Sums are in the dtype of the input.

When a rank dies or stalls, the others raise `CollectiveError`, which names it and the operation.

`rank`, `src` and `dst` count within the group.
"""

from mcore_parallel.collectives.buffers import (
    Work,
    all_gather_into,
    all_reduce_,
    receive_into,
    reduce_scatter_into,
    send_to,
)
from mcore_parallel.collectives.gradients import (
    copy_to_group,
    exchange,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)
from mcore_parallel.collectives.plain import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    reduce_scatter,
)

__all__ = [
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "copy_to_group",
    "exchange",
    "gather_from_group",
    "gather_sequence",
    "receive_into",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_into",
    "reduce_scatter_sequence",
    "scatter_to_group",
    "send_to",
]

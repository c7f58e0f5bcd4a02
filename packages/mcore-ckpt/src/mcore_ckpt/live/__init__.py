"""Moving tensors between two live meshes in memory: the same planner as checkpoints, no disk.

`LiveTransfer` is planned once and called as often as weights change; how bytes travel is a
`Transport`. `mcore_ckpt.live.testing` has the suite that every transport must pass.
"""

from mcore_ckpt.live.link import DEFAULT_STAGING_BYTES, LiveTransfer, Moved, PlanCache
from mcore_ckpt.live.transport import (
    GROUP,
    GroupTransport,
    Transport,
    TransportKind,
    open_transport,
)

__all__ = [
    "DEFAULT_STAGING_BYTES",
    "GROUP",
    "GroupTransport",
    "LiveTransfer",
    "Moved",
    "PlanCache",
    "Transport",
    "TransportKind",
    "open_transport",
]

"""Checkpoints of `torch.distributed.checkpoint` (`.metadata` and `.distcp` files), in and out.

`mcore_ckpt.dcp.sink` has the way out; it loads `torch.distributed.checkpoint`, which the way in
does without.
"""

from mcore_ckpt.dcp.source import DcpFolder

__all__ = ["DcpFolder"]

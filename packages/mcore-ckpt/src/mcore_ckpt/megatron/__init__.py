"""Checkpoints of Megatron-LM, read: `torch_dist`, `fsdp_dtensor`, and its older files by rank."""

from mcore_ckpt.megatron.checkpoint import MegatronCheckpoint
from mcore_ckpt.megatron.family import Family, find_family
from mcore_ckpt.megatron.finding import find_checkpoint

__all__ = ["Family", "MegatronCheckpoint", "find_checkpoint", "find_family"]

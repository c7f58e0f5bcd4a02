"""Data parallelism: gradient buckets, and an optimizer whose state is cut over the ranks."""

from mcore_parallel.data.buckets import Bucket, Piece, Slot
from mcore_parallel.data.ddp import GradientBuckets
from mcore_parallel.data.norm import NonFinite, clip_factor
from mcore_parallel.data.optimizer import ShardedOptimizer
from mcore_parallel.data.partition import Partition, Placement, flat, whole
from mcore_parallel.data.shard import Hyper, HyperRule, decay

__all__ = [
    "Bucket",
    "GradientBuckets",
    "Hyper",
    "HyperRule",
    "NonFinite",
    "Partition",
    "Piece",
    "Placement",
    "ShardedOptimizer",
    "Slot",
    "clip_factor",
    "decay",
    "flat",
    "whole",
]

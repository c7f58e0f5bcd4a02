"""Data parallelism: gradient buckets, and an optimizer whose state is cut over the ranks."""

from mcore_parallel.data.buckets import Bucket
from mcore_parallel.data.ddp import GradientBuckets
from mcore_parallel.data.levels import data_parallel
from mcore_parallel.data.main_grad import main_grad
from mcore_parallel.data.norm import NonFinite, clip_factor
from mcore_parallel.data.optimizer import ShardedOptimizer
from mcore_parallel.data.partition import Partition, Placement, flat, whole
from mcore_parallel.data.shard import Hyper, HyperRule, decay
from mcore_parallel.data.share import Piece, Share, Slot

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
    "Share",
    "Slot",
    "clip_factor",
    "data_parallel",
    "decay",
    "flat",
    "main_grad",
    "whole",
]

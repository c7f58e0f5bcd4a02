"""Context parallelism: the ranks of a group hold shares of every document and attend over all.

`SequenceSplit` says who holds which rows; `context_attention` gives one of four implementations of
`AttentionOp` over them. Everything else in a model works on single rows and needs no change, except
that parameters see different rows on each rank: their gradients are summed over the group.
"""

from mcore_parallel.context.gather import AllGatherAttention
from mcore_parallel.context.heads import AllToAllAttention, check_heads
from mcore_parallel.context.kinds import ContextKind, check_context_attention, context_attention
from mcore_parallel.context.ring import RingAttention
from mcore_parallel.context.split import DocumentPadding, SequenceSplit, padded_length

__all__ = [
    "AllGatherAttention",
    "AllToAllAttention",
    "ContextKind",
    "DocumentPadding",
    "RingAttention",
    "SequenceSplit",
    "check_context_attention",
    "check_heads",
    "context_attention",
    "padded_length",
]

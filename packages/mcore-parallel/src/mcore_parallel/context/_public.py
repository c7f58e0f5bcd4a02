"""The public names of the package, in one place; `mcore_parallel.context` passes them on."""

from mcore_parallel.context.attention import ContextAttentionOp, context_attention
from mcore_parallel.context.gather import AllGatherAttention
from mcore_parallel.context.heads import AllToAllAttention, HeadExchange, WideRows
from mcore_parallel.context.kinds import (
    ContextKind,
    check_context_attention,
    check_heads,
    parse_kinds,
)
from mcore_parallel.context.ring import RingAttention
from mcore_parallel.context.split import DocumentPadding, SequenceSplit, padded_length

__all__ = [
    "AllGatherAttention",
    "AllToAllAttention",
    "ContextAttentionOp",
    "ContextKind",
    "DocumentPadding",
    "HeadExchange",
    "RingAttention",
    "SequenceSplit",
    "WideRows",
    "check_context_attention",
    "check_heads",
    "context_attention",
    "padded_length",
    "parse_kinds",
]

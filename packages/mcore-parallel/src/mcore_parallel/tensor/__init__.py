"""Tensor and sequence parallelism: linear layers, embedding, head and loss over a cut model."""

from mcore_parallel.tensor.function import parallel_linear
from mcore_parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor.loss import vocab_parallel_cross_entropy, vocab_parallel_log_prob
from mcore_parallel.tensor.partition import Part, fused_spec, padded_vocab_size
from mcore_parallel.tensor.vocab import (
    HeadUse,
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
)

__all__ = [
    "ColumnParallelLinear",
    "HeadUse",
    "Part",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "fused_spec",
    "gather_logits",
    "padded_vocab_size",
    "parallel_linear",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_prob",
]

"""Corpora, tokenizers, datasets and exactly resumable samplers."""

from mcore_data.chat import ChatTemplate
from mcore_data.datasets import (
    GPTDataset,
    GPTIndex,
    Sample,
    SampleSource,
    build_gpt_index,
    document_ranges,
    gpt_splits,
    parse_split,
    segment_bounds,
    segment_positions,
)
from mcore_data.indexed import (
    IndexedReader,
    IndexedWriter,
    build_index,
    index_header,
    sequence_offsets,
    token_dtype,
)
from mcore_data.inspection import Summary, summarise
from mcore_data.loader import MicroBatch, MicroBatchLoader, ValidationLoader, collate
from mcore_data.preprocessing import PreprocessReport, preprocess, train_sentencepiece
from mcore_data.sampler import BatchSampler, shuffled_order
from mcore_data.tokenizers import ByteTokenizer, Tokenizer, VocabSizes, load_tokenizer

__all__ = [
    "BatchSampler",
    "ByteTokenizer",
    "ChatTemplate",
    "GPTDataset",
    "GPTIndex",
    "IndexedReader",
    "IndexedWriter",
    "MicroBatch",
    "MicroBatchLoader",
    "PreprocessReport",
    "Sample",
    "SampleSource",
    "Summary",
    "Tokenizer",
    "ValidationLoader",
    "VocabSizes",
    "build_gpt_index",
    "build_index",
    "collate",
    "document_ranges",
    "gpt_splits",
    "index_header",
    "load_tokenizer",
    "parse_split",
    "preprocess",
    "segment_bounds",
    "segment_positions",
    "sequence_offsets",
    "shuffled_order",
    "summarise",
    "token_dtype",
    "train_sentencepiece",
]

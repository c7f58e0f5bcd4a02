"""Tokenizers: one interface, several kinds, kept in directories."""

from mcore_data.tokenizers.base import Tokenizer, VocabSizes, tokenizer_files
from mcore_data.tokenizers.byte import ByteTokenizer
from mcore_data.tokenizers.incremental import Decoder
from mcore_data.tokenizers.load import load_tokenizer
from mcore_data.tokenizers.null import NullTokenizer

__all__ = [
    "ByteTokenizer",
    "Decoder",
    "NullTokenizer",
    "Tokenizer",
    "VocabSizes",
    "load_tokenizer",
    "tokenizer_files",
]

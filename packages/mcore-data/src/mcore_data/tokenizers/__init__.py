"""Tokenizers: one interface, several kinds, kept in directories."""

from mcore_data.tokenizers.base import Tokenizer, VocabSizes, tokenizer_files
from mcore_data.tokenizers.byte import ByteTokenizer
from mcore_data.tokenizers.load import load_tokenizer

__all__ = ["ByteTokenizer", "Tokenizer", "VocabSizes", "load_tokenizer", "tokenizer_files"]

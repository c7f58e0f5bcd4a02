"""Indexed token files: `.bin` with the tokens, `.idx` with where each sequence lies."""

from mcore_data.indexed.files import merge, split
from mcore_data.indexed.format import (
    DTYPES,
    IndexHeader,
    build_index,
    index_header,
    parse_header,
    sequence_offsets,
    token_dtype,
)
from mcore_data.indexed.reader import IndexedReader
from mcore_data.indexed.storage import Storage
from mcore_data.indexed.writer import IndexedWriter

__all__ = [
    "DTYPES",
    "IndexHeader",
    "IndexedReader",
    "IndexedWriter",
    "Storage",
    "build_index",
    "index_header",
    "merge",
    "parse_header",
    "sequence_offsets",
    "split",
    "token_dtype",
]

"""Samples for training, made from indexed token files."""

from mcore_data.datasets.gpt import GPTDataset, gpt_splits
from mcore_data.datasets.gpt_index import GPTIndex, build_gpt_index
from mcore_data.datasets.sample import Sample, SampleSource, segment_bounds, segment_positions
from mcore_data.datasets.splits import document_ranges, parse_split

__all__ = [
    "GPTDataset",
    "GPTIndex",
    "Sample",
    "SampleSource",
    "build_gpt_index",
    "document_ranges",
    "gpt_splits",
    "parse_split",
    "segment_bounds",
    "segment_positions",
]

"""Samples for training, made from indexed token files."""

from mcore_data.datasets.bert import BERTDataset, MaskedSample, MaskingConfig
from mcore_data.datasets.blend import Blend, BlendedDataset
from mcore_data.datasets.blend_order import (
    BlendIndex,
    blend_index,
    counted_blend_index,
    scheduled_blend_index,
)
from mcore_data.datasets.corpus import Corpus, Parts, SourcePlan
from mcore_data.datasets.documents import DocumentDataset, VariableSource
from mcore_data.datasets.fim import FIMConfig, FIMDataset
from mcore_data.datasets.gpt import GPTDataset, gpt_splits
from mcore_data.datasets.gpt_index import GPTIndex, build_gpt_index
from mcore_data.datasets.mock import MockDataset, MockDocuments
from mcore_data.datasets.packing import PackedDataset, first_fit_decreasing
from mcore_data.datasets.preferences import PreferenceDataset, add_preference, collate_pairs
from mcore_data.datasets.sample import Sample, SampleSource, segment_bounds, segment_positions
from mcore_data.datasets.splits import document_ranges, parse_split
from mcore_data.datasets.t5 import SpanConfig, SpanSample, T5Dataset

__all__ = [
    "BERTDataset",
    "Blend",
    "BlendIndex",
    "BlendedDataset",
    "Corpus",
    "DocumentDataset",
    "FIMConfig",
    "FIMDataset",
    "GPTDataset",
    "GPTIndex",
    "MaskedSample",
    "MaskingConfig",
    "MockDataset",
    "MockDocuments",
    "PackedDataset",
    "Parts",
    "PreferenceDataset",
    "Sample",
    "SampleSource",
    "SourcePlan",
    "SpanConfig",
    "SpanSample",
    "T5Dataset",
    "VariableSource",
    "add_preference",
    "blend_index",
    "build_gpt_index",
    "collate_pairs",
    "counted_blend_index",
    "document_ranges",
    "first_fit_decreasing",
    "gpt_splits",
    "parse_split",
    "scheduled_blend_index",
    "segment_bounds",
    "segment_positions",
]

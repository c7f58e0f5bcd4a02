import subprocess
import sys
from pathlib import Path

import mcore_data

_TOKENISE = """
import sys, mcore_data
from pathlib import Path

folder = Path(sys.argv[1])
(folder / "x.jsonl").write_text('{"text": "one"}\\n{"text": "two"}\\n')
tokenizer = mcore_data.load_tokenizer(sys.argv[2])
report = mcore_data.preprocess(
    [folder / "x.jsonl"], tokenizer=tokenizer, output=folder / "c", append_eod=True
)
assert report.documents == 2
reader = mcore_data.IndexedReader(folder / "c")
assert [tokenizer.decode(tokens) for tokens in reader] == ["one", "two"]
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & set(sys.argv[3:])))
"""


def test_tokenising_needs_no_optional_library(tmp_path, sentencepiece_dir):
    """U01: importing the package and tokenising two lines loads no GPU library."""
    absent = ["torch", "triton", "transformer_engine", "apex", "transformers", "numba"]
    run = [sys.executable, "-c", _TOKENISE, str(tmp_path), str(sentencepiece_dir), *absent]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n", result.stderr


def test_public_names():
    assert sorted(mcore_data.__all__) == mcore_data.__all__
    assert mcore_data.__all__ == [
        "BERTDataset",
        "BatchRamp",
        "BatchSampler",
        "BatchSteps",
        "Blend",
        "BlendIndex",
        "BlendLoader",
        "BlendSampler",
        "BlendedDataset",
        "ByteTokenizer",
        "ChatTemplate",
        "Conversation",
        "Corpus",
        "DocumentDataset",
        "ExternalLoader",
        "FIMConfig",
        "FIMDataset",
        "GPTDataset",
        "GPTIndex",
        "IndexedReader",
        "IndexedWriter",
        "JoinedDataset",
        "MaskedSample",
        "MaskingConfig",
        "MicroBatch",
        "MicroBatchLoader",
        "MockDataset",
        "MockDocuments",
        "NullTokenizer",
        "PackedDataset",
        "Parts",
        "Preference",
        "PreferenceDataset",
        "PreprocessReport",
        "Sample",
        "SampleSource",
        "SourcePlan",
        "SpanConfig",
        "SpanSample",
        "StepLoader",
        "Storage",
        "Summary",
        "T5Dataset",
        "TokenBatchLoader",
        "TokenBatchSampler",
        "Tokenizer",
        "ValidationLoader",
        "VariableSource",
        "VocabSizes",
        "WeightSchedule",
        "add_preference",
        "balance",
        "blend_index",
        "build_gpt_index",
        "build_index",
        "collate",
        "collate_flat",
        "collate_pairs",
        "counted_blend_index",
        "document_ranges",
        "first_fit_decreasing",
        "gpt_splits",
        "index_header",
        "load_tokenizer",
        "parse_split",
        "preprocess",
        "preprocess_chat",
        "preprocess_preferences",
        "scheduled_blend_index",
        "segment_bounds",
        "segment_positions",
        "sequence_offsets",
        "shuffled_order",
        "split_sentences",
        "summarise",
        "token_dtype",
        "tokenise_conversation",
        "tokenise_preference",
        "train_sentencepiece",
    ]
    assert all(hasattr(mcore_data, name) for name in mcore_data.__all__)


def test_readme_runs(tmp_path, monkeypatch):
    readme = Path(__file__).parents[2] / "packages" / "mcore-data" / "README.md"
    blocks = readme.read_text().split("```python\n")[1:]
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block.split("```")[0], str(readme), "exec"), {"__name__": "readme"})

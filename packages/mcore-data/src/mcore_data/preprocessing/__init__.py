"""From text files to indexed tokens."""

from mcore_data.preprocessing.run import PreprocessReport, preprocess, train_sentencepiece

__all__ = ["PreprocessReport", "preprocess", "train_sentencepiece"]

"""From text files to indexed tokens."""

from mcore_data.preprocessing.chat import (
    Conversation,
    preprocess_chat,
    tokenise_conversation,
)
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.run import preprocess, train_sentencepiece

__all__ = [
    "Conversation",
    "PreprocessReport",
    "preprocess",
    "preprocess_chat",
    "tokenise_conversation",
    "train_sentencepiece",
]

"""From text files to indexed tokens."""

from mcore_data.preprocessing.chat import (
    Conversation,
    preprocess_chat,
    tokenise_conversation,
)
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.run import preprocess, train_sentencepiece
from mcore_data.preprocessing.sentences import split_sentences

__all__ = [
    "Conversation",
    "PreprocessReport",
    "preprocess",
    "preprocess_chat",
    "split_sentences",
    "tokenise_conversation",
    "train_sentencepiece",
]

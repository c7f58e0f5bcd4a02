from pathlib import Path

import pytest

from mcore_data import train_sentencepiece


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory):
    """A directory with a tokenizer of 600 pieces, trained on the tests beside this file."""
    directory = tmp_path_factory.mktemp("tokenizer") / "sp"
    files = sorted(Path(__file__).parent.rglob("*.py"))
    train_sentencepiece(files, output=directory, vocab_size=600)
    return directory

"""Train a SentencePiece BPE model that gives back any text exactly."""

import heapq
import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mcore_data.tokenizers.base import Tokenizer

_CUT: Final = 65_536  # characters; longer documents are sampled in parts of this size
_LONGEST: Final = 4_096  # characters of a training line
# The trainer skips or misreads lines with these: end of text, tab, its signs for blank and unknown.
_RESERVED: Final = re.compile("[\0\t\u2581\u2585]")


def sample_texts(documents: Iterable[str], max_chars: int, seed: int) -> list[str]:
    """Return a random part of `documents` of at most about `max_chars` characters, in order.

    All documents when they are fewer. One pass, memory bounded by the result; a long document
    counts as many short ones, so that it cannot crowd out the others.
    """
    rng = random.Random(seed)
    heap: list[tuple[float, int, str]] = []  # the part with the largest key leaves first
    size = count = 0
    for document in documents:
        for begin in range(0, len(document), _CUT):
            text = document[begin : begin + _CUT]
            heapq.heappush(heap, (-rng.random(), count, text))
            count += 1
            size += len(text)
            while size > max_chars and len(heap) > 1:
                size -= len(heapq.heappop(heap)[2])
    return [text for _, _, text in sorted(heap, key=lambda entry: entry[1])]


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        clean = text.encode("utf-8", "replace").decode()  # lone surrogates
        for line in clean.split("\n"):
            for part in _RESERVED.split(line):
                for begin in range(0, len(part), _LONGEST):
                    yield part[begin : begin + _LONGEST]


def train_bpe(
    documents: Iterable[str],
    *,
    vocab_size: int = 4096,
    sample_chars: int = 8_000_000,
    blank_runs: bool = True,
    seed: int = 0,
    num_threads: int = 2,
) -> Tokenizer:
    """Train a byte-fallback BPE model on (a sample of) `documents`.

    Args:
        documents: texts; read once.
        vocab_size: pieces, of which 259 are the 256 bytes, unknown, begin and end.
        sample_chars: characters to train on; a random part of the documents when they have more.
        blank_runs: allow pieces of several blanks, which shortens source code by a third; False
            spells every blank apart.
        seed: seed of the sample.
        num_threads: threads of the trainer; the result does not depend on them.

    Returns:
        A tokenizer with `decode(encode(text)) == text` for every text, `eos_id` = `eod_id` and
        no padding id.

    Raises:
        ValueError: no text, or a vocabulary that the text cannot fill or that is too small for
            its characters; the message names the nearest size that works.

    """
    import sentencepiece

    from mcore_data.tokenizers.sentencepiece import SentencePieceTokenizer

    lines = [line for line in _lines(sample_texts(documents, sample_chars, seed)) if line]
    if not lines:
        raise ValueError("no text to train a tokenizer on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=blank_runs,
            max_sentence_length=4 * _LONGEST,
            num_threads=num_threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), vocab_size)) from None
    return SentencePieceTokenizer(model.getvalue(), exact=True)


def _explain(message: str, vocab_size: int) -> str:
    if found := re.search(r"set it to a value <= (\d+)", message):
        return f"vocab_size {vocab_size} is more than the text fills; the most is {found[1]}"
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return f"vocab_size {vocab_size} is too small for the characters; the least is {found[1]}"
    return f"training failed: {message}"


def save_tokenizer(tokenizer: Tokenizer, output: str | Path) -> None:
    """Save into `output`; ValueError when it is a file."""
    if Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"{output} is a file; a tokenizer is saved into a directory")
    tokenizer.save(output)

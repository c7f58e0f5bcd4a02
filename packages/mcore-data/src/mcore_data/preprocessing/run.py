"""The two jobs on text: tokenise a corpus, train a tokenizer on it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mcore_data.indexed import token_dtype
from mcore_data.preprocessing.encode import TextEncoder, document_texts
from mcore_data.preprocessing.job import Job
from mcore_data.preprocessing.report import PreprocessReport
from mcore_data.preprocessing.sources import (
    Task,
    expand_inputs,
    file_tasks,
    is_jsonl,
    is_parquet,
    text_tasks,
)
from mcore_data.tokenizers import Tokenizer
from mcore_data.tokenizers.train import save_tokenizer, train_bpe


def _tasks(
    files: list[Path] | None, documents: Iterable[str] | None, keys: Sequence[str]
) -> Iterator[Task]:
    if documents is not None:
        if len(keys) > 1:
            raise ValueError(f"{len(keys)} keys for documents given as text, which have none")
        return text_tasks(documents)
    assert files is not None
    plain = [path for path in files if not (is_jsonl(path) or is_parquet(path))]
    if len(keys) > 1 and plain:
        raise ValueError(f"{plain[0]}: {len(keys)} keys for a text file, which has none")
    return file_tasks(files, keys)


def _files(
    inputs: Iterable[str | Path] | None, documents: Iterable[str] | None
) -> list[Path] | None:
    if (inputs is None) == (documents is None):
        raise ValueError("give either inputs (files) or documents (texts)")
    if inputs is None:
        return None
    return expand_inputs([inputs] if isinstance(inputs, str | Path) else inputs)


def preprocess(
    inputs: Iterable[str | Path] | None = None,
    *,
    documents: Iterable[str] | None = None,
    tokenizer: Tokenizer,
    output: str | Path,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    sentences: bool = False,
    workers: int = 1,
    strict: bool = False,
    resume: bool = False,
    partition: tuple[int, int] = (0, 1),
    progress: bool | None = None,
) -> PreprocessReport:
    """Tokenise a corpus into `.bin/.idx` files, in the order of the input.

    The result does not depend on `workers`, and memory does not grow with the corpus. Nothing
    is written under the final names unless all of it succeeds. Ids are stored as uint16 when
    the vocabulary has fewer than 65,500, else as int32.

    Args:
        inputs: files, folders or glob patterns. `.jsonl`, `.ndjson` and `.json` files hold one
            JSON object per line, `.parquet` files (extra `parquet`) one document per row; any
            other file is one document of text. All but Parquet may be `.gz` or `.zst` (extra
            `zstd`).
        documents: the texts themselves, instead of `inputs`; drawn as they are needed.
        tokenizer: what turns text into ids.
        output: path of the files without `.bin` and `.idx`; existing ones are replaced.
        keys: keys of the text in JSON objects, or columns. Each of several goes to files of its
            own, named `output` + `_` + key.
        append_eod: end every document with the tokenizer's EOD id, counted in its length.
        sentences: make each sentence of a document (`split_sentences`) a sequence of its own, as
            datasets of pairs of sentences need them.
        workers: processes to tokenise in. A script that uses more than one needs the usual
            `if __name__ == "__main__"`.
        strict: stop at the first bad line, with its file and number.
        resume: keep what is done in a hidden folder beside the output, and go on from there when
            the same call is made again after a kill. The result is the same, to the byte.
        partition: (i, n): tokenise the i-th of n parts of the input, counted from 0, so that n
            machines share the work; each reads all of a `.jsonl` file but tokenises its part.
            `mcore_data.indexed.merge` joins the results.
        progress: show a progress bar (None: when standard error is a terminal).

    Returns:
        Counts of what was written and left out. Documents without a token are left out and
        counted as `empty`, with or without `append_eod`; unreadable lines are counted as `bad`.

    Raises:
        ValueError: an input names nothing, the tokenizer has no EOD id to append, no document
            is left, (strict) a line is bad, or (resume) another run of the same output is at work
            or left its folder.
        ChildProcessError: a worker died.

    """
    if append_eod and tokenizer.eod_id is None:
        raise ValueError("append_eod needs a tokenizer with an EOD id, this one has none")
    if not keys:
        raise ValueError("no keys, at least one is needed")
    if twice := [key for key in keys if list(keys).count(key) > 1]:
        raise ValueError(f"key {twice[0]!r} is given twice, its documents would be written twice")
    base = Path(output)
    names = {k: base.with_name(f"{base.name}_{k}") if len(keys) > 1 else base for k in keys}
    job = Job(
        encoder=TextEncoder(
            tokenizer=tokenizer,
            keys=tuple(keys),
            append=tokenizer.eod_id if append_eod else None,
            sentences=sentences,
        ),
        outputs=names,
        dtype=token_dtype(tokenizer.vocab_size),
        workers=workers,
        strict=strict,
        partition=partition,
        progress=progress,
    )
    files = _files(inputs, documents)
    if resume and files is None:
        raise ValueError("resume needs inputs (files), documents cannot be read again")
    return job.run(_tasks(files, documents, keys), files=files if resume else None, base=base)


def train_sentencepiece(
    inputs: Iterable[str | Path] | None = None,
    *,
    documents: Iterable[str] | None = None,
    output: str | Path,
    vocab_size: int = 4096,
    key: str = "text",
    sample_chars: int = 8_000_000,
    blank_runs: bool = True,
    seed: int = 0,
) -> Tokenizer:
    """Train a SentencePiece BPE tokenizer and save it in the directory `output`.

    `inputs`, `documents` and `key` as in `preprocess`, the rest as in
    `mcore_data.tokenizers.train.train_bpe`. What cannot be read is passed over. Returns the
    tokenizer; ValueError as there.
    """
    tasks = _tasks(_files(inputs, documents), documents, (key,))
    tokenizer = train_bpe(
        (text for task in tasks for text in document_texts(task, (key,))),
        vocab_size=vocab_size,
        sample_chars=sample_chars,
        blank_runs=blank_runs,
        seed=seed,
    )
    save_tokenizer(tokenizer, output)
    return tokenizer

"""The two jobs on text: tokenise a corpus, train a tokenizer on it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tqdm import tqdm

from mcore_data.indexed import IndexedWriter, token_dtype
from mcore_data.preprocessing.encode import Encoded, Encoder, document_texts
from mcore_data.preprocessing.pool import ordered_map
from mcore_data.preprocessing.sources import (
    Task,
    expand_inputs,
    file_tasks,
    is_jsonl,
    text_tasks,
)
from mcore_data.tokenizers import Tokenizer
from mcore_data.tokenizers.train import save_tokenizer, train_bpe

_EXAMPLES: Final = 20  # bad lines that a report quotes


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """What `preprocess` did.

    Attributes:
        outputs: prefixes of the files written.
        documents: documents written.
        tokens: tokens written, EOD tokens included.
        empty: documents left out because they hold no token.
        repaired: documents with invalid UTF-8 or lone surrogates, replaced by U+FFFD.
        bad: lines or files left out because they could not be read.
        bad_lines: the first of those, each with its place and the reason.
        seconds: wall-clock time.

    """

    outputs: tuple[Path, ...]
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    repaired: int = 0
    bad: int = 0
    bad_lines: tuple[str, ...] = ()
    seconds: float = 0.0

    def plus(self, part: Encoded) -> "PreprocessReport":
        """Return the report with one more task counted."""
        return replace(
            self,
            documents=self.documents + sum(len(v) for v in part.lengths.values()),
            tokens=self.tokens + sum(len(v) for v in part.tokens.values()),
            empty=self.empty + part.empty,
            repaired=self.repaired + part.repaired,
            bad=self.bad + len(part.bad),
            bad_lines=(self.bad_lines + part.bad)[:_EXAMPLES],
        )


def _tasks(
    inputs: Iterable[str | Path] | None, documents: Iterable[str] | None, num_keys: int
) -> Iterator[Task]:
    if (inputs is None) == (documents is None):
        raise ValueError("give either inputs (files) or documents (texts)")
    if documents is not None:
        if num_keys > 1:
            raise ValueError(f"{num_keys} keys for documents given as text, which have none")
        return text_tasks(documents)
    assert inputs is not None
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    files = expand_inputs(inputs)
    if num_keys > 1 and (plain := [path for path in files if not is_jsonl(path)]):
        raise ValueError(f"{plain[0]}: {num_keys} keys for a text file, which has none")
    return file_tasks(files)


def preprocess(
    inputs: Iterable[str | Path] | None = None,
    *,
    documents: Iterable[str] | None = None,
    tokenizer: Tokenizer,
    output: str | Path,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    strict: bool = False,
    progress: bool | None = None,
) -> PreprocessReport:
    """Tokenise a corpus into `.bin/.idx` files, in the order of the input.

    The result does not depend on `workers`, and memory does not grow with the corpus. Nothing
    is written under the final names unless all of it succeeds. Ids are stored as uint16 when
    the vocabulary has fewer than 65,500, else as int32.

    Args:
        inputs: files, folders or glob patterns. `.jsonl`, `.ndjson` and `.json` files hold one
            JSON object per line; any other file is one document of text. All may be `.gz`.
        documents: the texts themselves, instead of `inputs`; drawn as they are needed.
        tokenizer: what turns text into ids.
        output: path of the files without `.bin` and `.idx`; existing ones are replaced.
        keys: keys of the text in JSON objects. Each of several goes to files of its own, named
            `output` + `_` + key.
        append_eod: end every document with the tokenizer's EOD id, counted in its length.
        workers: processes to tokenise in. A script that uses more than one needs the usual
            `if __name__ == "__main__"`.
        strict: stop at the first bad line, with its file and number.
        progress: show a progress bar (None: when standard error is a terminal).

    Returns:
        Counts of what was written and left out. Documents without a token are left out and
        counted as `empty`, with or without `append_eod`; unreadable lines are counted as `bad`.

    Raises:
        ValueError: an input names nothing, the tokenizer has no EOD id to append, no document
            is left, or (strict) a line is bad.
        ChildProcessError: a worker died.

    """
    if append_eod and tokenizer.eod_id is None:
        raise ValueError("append_eod needs a tokenizer with an EOD id, this one has none")
    if not keys or workers < 1:
        raise ValueError(f"{len(keys)} keys and {workers} workers, each must be at least 1")
    begin = time.perf_counter()
    base = Path(output)
    names = {k: base.with_name(f"{base.name}_{k}") if len(keys) > 1 else base for k in keys}
    encoder = Encoder(
        tokenizer=tokenizer, keys=tuple(keys), append=tokenizer.eod_id if append_eod else None
    )
    tasks = _tasks(inputs, documents, len(keys))
    report = PreprocessReport(outputs=tuple(names.values()))
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {k: stack.enter_context(IndexedWriter(p, dtype)) for k, p in names.items()}
        disable = None if progress is None else not progress
        bar = stack.enter_context(tqdm(unit=" documents", unit_scale=True, disable=disable))
        for part in ordered_map(encoder, tasks, workers=workers):
            if strict and part.bad:
                raise ValueError(part.bad[0])
            for key, writer in writers.items():
                writer.add_documents(part.tokens[key], part.lengths[key])
            written = report.documents
            report = report.plus(part)
            rate = report.tokens / (time.perf_counter() - begin)
            bar.set_postfix_str(f"{report.tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False)
            bar.update(report.documents - written)
        if not report.documents:
            reason = f"{report.empty} empty, {report.bad} bad"
            first = f"; {report.bad_lines[0]}" if report.bad_lines else ""
            raise ValueError(f"no document to write ({reason}{first})")
    return replace(report, seconds=time.perf_counter() - begin)


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
    tasks = _tasks(inputs, documents, 1)
    tokenizer = train_bpe(
        (text for task in tasks for text in document_texts(task, (key,))),
        vocab_size=vocab_size,
        sample_chars=sample_chars,
        blank_runs=blank_runs,
        seed=seed,
    )
    save_tokenizer(tokenizer, output)
    return tokenizer

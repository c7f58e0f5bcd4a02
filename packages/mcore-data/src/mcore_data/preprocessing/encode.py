"""What a worker does with a task: decode, find the text, tokenise."""

import codecs
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed import token_dtype
from mcore_data.indexed.format import MAX_LENGTH
from mcore_data.preprocessing.sentences import split_sentences
from mcore_data.preprocessing.sources import (
    FilesTask,
    LinesTask,
    RowsTask,
    Task,
    read_whole,
    text_lines,
)
from mcore_data.tokenizers import Tokenizer


class Text(NamedTuple):
    """A document's text under a key, and where it comes from."""

    key: str
    text: str
    place: str


class BadDocumentError(ValueError):
    """A document that cannot be read; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Tokenised documents back to back: D documents of S sequences.

    Attributes:
        tokens: ids, in the dtype of the files.
        lengths: tokens per sequence, int64 [S].
        sequences: sequences per document, int64 [D].
        modes: mode of each sequence, int8 [S], in files that have them.

    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    sequences: NDArray[np.int64]
    modes: NDArray[np.int8] | None = None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The result of a task: documents by key, and counts of what became of the rest."""

    documents: dict[str, Documents]
    empty: int
    repaired: int
    bad: tuple[str, ...]


class TaskEncoder(Protocol):
    """Turns tasks into tokens; picklable, since it is sent to the worker processes."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes the ids."""
        ...

    @property
    def multimodal(self) -> bool:
        """Whether its documents have modes."""
        ...

    def options(self) -> dict[str, object]:
        """Return what else decides the result, JSON-able."""
        ...

    def __call__(self, task: Task, /) -> Encoded:
        """Return the tokens of a task."""
        ...


@dataclass(kw_only=True)
class Tally:
    """Counts while a task is read."""

    empty: int = 0
    repaired: int = 0
    bad: list[str] = field(default_factory=list)


class Gathered:
    """Documents of one key while they come in."""

    def __init__(self, dtype: np.dtype[Any], *, multimodal: bool = False) -> None:
        self._dtype = dtype
        self._tokens: list[NDArray[Any]] = []
        self._lengths: list[int] = []
        self._sequences: list[int] = []
        self._modes: list[int] | None = [] if multimodal else None

    def add(
        self,
        sequences: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
        modes: Sequence[int] = (),
    ) -> None:
        """Append one document; BadDocumentError when the format cannot hold it."""
        size = sum(map(len, sequences))
        if size > MAX_LENGTH:
            raise BadDocumentError(f"a document of {size} tokens, the format holds {MAX_LENGTH}")
        self._tokens += [_packed(ids, self._dtype) for ids in sequences]
        self._lengths += map(len, sequences)
        self._sequences.append(len(sequences))
        if self._modes is not None:
            self._modes += modes

    def documents(self) -> Documents:
        """Return what came in."""
        return Documents(
            tokens=np.concatenate([np.empty(0, self._dtype), *self._tokens]),
            lengths=np.array(self._lengths, np.int64),
            sequences=np.array(self._sequences, np.int64),
            modes=None if self._modes is None else np.array(self._modes, np.int8),
        )


def _packed(ids: Sequence[int] | NDArray[np.integer[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(ids, np.ndarray):
        return ids.astype(dtype)
    # Twice as fast as numpy's own conversion of lists.
    return np.frombuffer(array("q", ids), np.int64).astype(dtype)


def _decode(raw: bytes, tally: Tally) -> str:
    """Decode UTF-8 without its byte order mark; invalid bytes become U+FFFD and are counted."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        tally.repaired += 1
        return raw.decode("utf-8", "replace")


def _file_text(path: Path, tally: Tally) -> str:
    raw = read_whole(path)
    place = raw.find(b"\0")
    if place >= 0:
        raise BadDocumentError(f"no text, byte {place} is NUL")
    return _decode(raw, tally)


def json_object(line: bytes) -> dict[str, Any]:
    """Return the object that a line holds; BadDocumentError says why there is none."""
    try:
        value = json.loads(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        message = error.msg.removesuffix(" at")
        raise BadDocumentError(f"no JSON, {message} at character {error.pos}") from None
    except RecursionError:
        raise BadDocumentError("no JSON that can be read, it is nested too deep") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise BadDocumentError(f"no JSON that can be read, {error}") from None
    if not isinstance(value, dict):
        raise BadDocumentError(f"a JSON {type(value).__name__}, not an object")
    return value


def _line_texts(line: bytes, keys: tuple[str, ...]) -> list[tuple[str, str]]:
    value = json_object(line)
    texts = []
    for key in keys:
        if key not in value:
            found = ", ".join(repr(k) for k in list(value)[:8]) or "none"
            raise BadDocumentError(f"no key {key!r}; keys are {found}")
        if not isinstance(value[key], str):
            raise BadDocumentError(f"{key!r} is a {type(value[key]).__name__}, not a string")
        texts.append((key, value[key]))
    return texts


def texts(task: Task, keys: tuple[str, ...], tally: Tally) -> Iterator[Text]:
    """Yield the documents of a task; what cannot be read goes to the tally."""
    if isinstance(task, FilesTask):
        for path in task.paths:
            try:
                yield Text(keys[0], _file_text(path, tally), str(path))
            except BadDocumentError as error:
                tally.bad.append(f"{path}: {error}")
    elif isinstance(task, LinesTask):
        for number, line in text_lines(task):
            place = f"{task.path}:{number}"
            try:
                for key, text in _line_texts(line, keys):
                    yield Text(key, text, place)
            except BadDocumentError as error:
                tally.bad.append(f"{place}: {error}")
    elif isinstance(task, RowsTask):
        yield from _row_texts(task, keys, tally)
    else:
        for number, text in enumerate(task.texts, task.first):
            yield Text(keys[0], text, f"document {number}")


def _row_texts(task: RowsTask, keys: tuple[str, ...], tally: Tally) -> Iterator[Text]:
    rows = zip(*(task.columns[key] for key in keys), strict=True)
    for number, row in enumerate(rows, task.first_row):
        place = f"{task.path}: row {number}"
        if None in row:
            tally.bad.append(f"{place}: {keys[row.index(None)]!r} is null")
            continue
        for key, text in zip(keys, row, strict=True):
            if text is not None:
                yield Text(key, text, place)


def document_texts(task: Task, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts of a task, passing over what cannot be read."""
    return (found.text for found in texts(task, keys, Tally()))


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """Turns texts into documents of one sequence, or of one for each sentence."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append: int | None  # id to end each document with
    sentences: bool = False

    @property
    def multimodal(self) -> bool:
        """Texts have no modes."""
        return False

    def options(self) -> dict[str, object]:
        """Return what decides the result beside the tokenizer."""
        return {"keys": list(self.keys), "append": self.append, "sentences": self.sentences}

    def __call__(self, task: Task) -> Encoded:
        """Return the tokens of a task."""
        tally = Tally()
        dtype = token_dtype(self.tokenizer.vocab_size)
        gathered = {key: Gathered(dtype) for key in self.keys}
        found = list(texts(task, self.keys, tally))
        pieces = [self._pieces(item.text, tally) for item in found]
        ids = iter(_encode_all(self.tokenizer, [piece for part in pieces for piece in part]))
        for item, part in zip(found, pieces, strict=True):
            encoded = [next(ids) for _ in part]
            try:
                self._add(gathered[item.key], encoded, tally)
            except BadDocumentError as error:
                tally.bad.append(f"{item.place}: {error}")
        return Encoded(
            documents={key: value.documents() for key, value in gathered.items()},
            empty=tally.empty,
            repaired=tally.repaired,
            bad=tuple(tally.bad),
        )

    def _pieces(self, text: str, tally: Tally) -> list[str]:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:  # JSON can spell lone surrogates, which no text has
                tally.repaired += 1
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return split_sentences(text) if self.sentences else [text]

    def _add(
        self, gathered: Gathered, encoded: list[list[int] | BadDocumentError], tally: Tally
    ) -> None:
        sequences: list[list[int]] = []
        for ids in encoded:
            if isinstance(ids, BadDocumentError):
                raise ids
            if ids:
                sequences.append(ids)
        if not sequences:
            tally.empty += 1
            return
        if self.append is not None:
            sequences[-1] = [*sequences[-1], self.append]
        gathered.add(sequences)


def _encode_all(tokenizer: Tokenizer, pieces: list[str]) -> list[list[int] | BadDocumentError]:
    """Return the ids of each piece, or why the tokenizer refuses it."""
    try:
        return [*tokenizer.encode_batch(pieces)]
    except ValueError:
        return [_encode_one(tokenizer, piece) for piece in pieces]


def _encode_one(tokenizer: Tokenizer, piece: str) -> list[int] | BadDocumentError:
    try:
        return tokenizer.encode(piece)
    except ValueError as error:
        return BadDocumentError(str(error))

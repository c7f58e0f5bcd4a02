"""What a worker does with a task: decode, find the text, tokenise."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed import token_dtype
from mcore_data.preprocessing.sources import (
    FilesTask,
    LinesTask,
    RowsTask,
    Task,
    read_whole,
    text_lines,
)
from mcore_data.tokenizers import Tokenizer

Text = tuple[str, str]  # key, text


class BadDocumentError(ValueError):
    """A document that cannot be read; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The result of a task: per key the tokens back to back and the length of each document."""

    tokens: dict[str, NDArray[Any]]
    lengths: dict[str, NDArray[np.int64]]
    empty: int
    repaired: int
    bad: tuple[str, ...]


@dataclass(kw_only=True)
class _Tally:
    repaired: int = 0
    bad: list[str] = field(default_factory=list)


def _decode(raw: bytes, tally: _Tally) -> str:
    """Decode UTF-8 without its byte order mark; invalid bytes become U+FFFD and are counted."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        tally.repaired += 1
        return raw.decode("utf-8", "replace")


def _file_text(path: Path, tally: _Tally) -> str:
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
    if not isinstance(value, dict):
        raise BadDocumentError(f"a JSON {type(value).__name__}, not an object")
    return value


def _line_texts(line: bytes, keys: tuple[str, ...]) -> list[Text]:
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


def texts(task: Task, keys: tuple[str, ...], tally: _Tally) -> Iterator[Text]:
    """Yield key and text of the documents of a task; what cannot be read goes to the tally."""
    if isinstance(task, FilesTask):
        for path in task.paths:
            try:
                yield keys[0], _file_text(path, tally)
            except BadDocumentError as error:
                tally.bad.append(f"{path}: {error}")
    elif isinstance(task, LinesTask):
        for number, line in text_lines(task):
            try:
                yield from _line_texts(line, keys)
            except BadDocumentError as error:
                tally.bad.append(f"{task.path}:{number}: {error}")
    elif isinstance(task, RowsTask):
        yield from _row_texts(task, keys, tally)
    else:
        for text in task.texts:
            yield keys[0], text


def _row_texts(task: RowsTask, keys: tuple[str, ...], tally: _Tally) -> Iterator[Text]:
    for number, row in enumerate(zip(*(task.columns[key] for key in keys), strict=True)):
        if None in row:
            missing = keys[row.index(None)]
            tally.bad.append(f"{task.path}: row {task.first_row + number}: {missing!r} is null")
        else:
            yield from (
                (key, text) for key, text in zip(keys, row, strict=True) if text is not None
            )


def document_texts(task: Task, keys: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts of a task, passing over what cannot be read."""
    return (text for _, text in texts(task, keys, _Tally()))


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns tasks into tokens; sent to the worker processes."""

    tokenizer: Tokenizer
    keys: tuple[str, ...]
    append: int | None  # id to end each document with

    def __call__(self, task: Task) -> Encoded:
        """Return the tokens of a task."""
        tally = _Tally()
        dtype = token_dtype(self.tokenizer.vocab_size)
        tokens: dict[str, list[NDArray[Any]]] = {key: [] for key in self.keys}
        lengths: dict[str, list[int]] = {key: [] for key in self.keys}
        end = np.array([] if self.append is None else [self.append], dtype)
        empty = 0
        for key, text in texts(task, self.keys, tally):
            ids = self._encode(text, tally)
            if not ids:
                empty += 1
                continue
            tokens[key] += [np.array(ids, dtype), end]
            lengths[key].append(len(ids) + len(end))
        return Encoded(
            tokens={k: np.concatenate(v) if v else np.empty(0, dtype) for k, v in tokens.items()},
            lengths={key: np.array(value, np.int64) for key, value in lengths.items()},
            empty=empty,
            repaired=tally.repaired,
            bad=tuple(tally.bad),
        )

    def _encode(self, text: str, tally: _Tally) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell lone surrogates, which no Unicode text has
            tally.repaired += 1
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self.tokenizer.encode(text)

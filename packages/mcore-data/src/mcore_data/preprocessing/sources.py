"""Find input files and cut them into tasks small enough to hand around."""

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TASK_BYTES: Final = 1 << 20
_JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
_UNREAD_SUFFIXES: Final = (".parquet", ".zst", ".bz2", ".xz", ".zip", ".tar", ".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class FilesTask:
    """Files that are one document each."""

    paths: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class LinesTask:
    """Consecutive lines of a JSONL file."""

    path: Path
    first_line: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class TextsTask:
    """Documents given as text."""

    first: int
    texts: tuple[str, ...]


Task = FilesTask | LinesTask | TextsTask


def expand_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the files that `inputs` name: files, folders (searched deep), glob patterns.

    Files of a folder or pattern come sorted, hidden ones are passed over. ValueError for an
    input that names nothing or a kind of file that is not read.
    """
    files: list[Path] = []
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        elif path.exists():
            if path.suffix in _UNREAD_SUFFIXES:
                raise ValueError(
                    f"{path}: {path.suffix} files are not read; JSONL and text are, plain or .gz"
                )
            found = [path]
        else:
            matches = sorted(glob.glob(str(item), recursive=True))
            found = [Path(match) for match in matches if Path(match).is_file()]
        if not found:
            raise ValueError(f"{item}: no such file, folder with files, or pattern that matches")
        files += found
    return files


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def is_jsonl(path: Path) -> bool:
    """Whether the name says that each line is a JSON document."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix in _JSON_SUFFIXES


def read_whole(path: Path) -> bytes:
    """Return the content of a file, unpacked when it is `.gz`; ValueError when it is damaged."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error})") from None


def _line_tasks(path: Path) -> Iterator[LinesTask]:
    lines: list[bytes] = []
    size = 0
    number = first = 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for line in file:
                lines.append(line)
                size += len(line)
                number += 1
                if size >= _TASK_BYTES:
                    yield LinesTask(path=path, first_line=first, lines=tuple(lines))
                    lines, size, first = [], 0, number
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}:{number}: damaged gzip file ({error})") from None
    if lines:
        yield LinesTask(path=path, first_line=first, lines=tuple(lines))


def file_tasks(files: Sequence[Path]) -> Iterator[Task]:
    """Yield the tasks that cover `files` in order, of about one MiB each."""
    group: list[Path] = []
    size = 0
    for path in files:
        jsonl = is_jsonl(path)
        if group and (jsonl or size >= _TASK_BYTES):
            yield FilesTask(paths=tuple(group))
            group, size = [], 0
        if jsonl:
            yield from _line_tasks(path)
        else:
            group.append(path)
            size += path.stat().st_size
    if group:
        yield FilesTask(paths=tuple(group))


def text_tasks(documents: Iterable[str]) -> Iterator[TextsTask]:
    """Yield the tasks that cover `documents` in order."""
    texts: list[str] = []
    size = 0
    first = 1
    for number, text in enumerate(documents, 1):
        texts.append(text)
        size += len(text)
        if size >= _TASK_BYTES:
            yield TextsTask(first=first, texts=tuple(texts))
            texts, size, first = [], 0, number + 1
    if texts:
        yield TextsTask(first=first, texts=tuple(texts))

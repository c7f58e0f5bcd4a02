"""Find input files and cut them into tasks small enough to hand around."""

import codecs
import glob
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_TASK_BYTES: Final = 1 << 20
_JSON_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")
_PACKED_SUFFIXES: Final = (".gz", ".zst")
_UNREAD_SUFFIXES: Final = (".bz2", ".xz", ".zip", ".tar", ".bin", ".idx")


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


@dataclass(frozen=True, kw_only=True)
class RowsTask:
    """Consecutive rows of a Parquet file: the text of each column, None where there is none."""

    path: Path
    first_row: int
    columns: Mapping[str, tuple[str | None, ...]]


Task = FilesTask | LinesTask | TextsTask | RowsTask


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
                    f"{path}: {path.suffix} files are not read; JSONL, text (plain, "
                    ".gz or .zst) and Parquet are"
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
    name = path.with_suffix("") if path.suffix in _PACKED_SUFFIXES else path
    return name.suffix in _JSON_SUFFIXES


def is_parquet(path: Path) -> bool:
    """Whether the name says that each row is a document."""
    return path.suffix == ".parquet"


def open_unpacked(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked when it is `.gz` or `.zst`."""
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(path))
    if path.suffix == ".zst":
        from mcore_data.preprocessing.zstd import open_zstd

        return open_zstd(path)
    return open(path, "rb")


def read_whole(path: Path) -> bytes:
    """Return the content of a file, unpacked; ValueError when it is damaged."""
    try:
        with open_unpacked(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged {path.suffix} file ({error})") from None


def _line_tasks(path: Path) -> Iterator[LinesTask]:
    lines: list[bytes] = []
    size = 0
    number = first = 1
    try:
        with open_unpacked(path) as file:
            for line in file:
                lines.append(line)
                size += len(line)
                number += 1
                if size >= _TASK_BYTES:
                    yield LinesTask(path=path, first_line=first, lines=tuple(lines))
                    lines, size, first = [], 0, number
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}:{number}: damaged {path.suffix} file ({error})") from None
    if lines:
        yield LinesTask(path=path, first_line=first, lines=tuple(lines))


def text_lines(task: LinesTask) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the lines that are not blank, without a byte order mark."""
    for number, line in enumerate(task.lines, task.first_line):
        bare = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not bare.isspace():
            yield number, bare


def file_tasks(files: Sequence[Path], keys: Sequence[str] = ("text",)) -> Iterator[Task]:
    """Yield the tasks that cover `files` in order, of about one MiB each.

    `keys`: columns to read from Parquet files.
    """
    group: list[Path] = []
    size = 0
    for path in files:
        single = not (is_jsonl(path) or is_parquet(path))
        if group and (not single or size >= _TASK_BYTES):
            yield FilesTask(paths=tuple(group))
            group, size = [], 0
        if is_parquet(path):
            from mcore_data.preprocessing.parquet import row_blocks

            for first, columns in row_blocks(path, keys, _TASK_BYTES):
                yield RowsTask(path=path, first_row=first, columns=columns)
        elif not single:
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

"""Parquet files, through the library `pyarrow` (extra `parquet`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

Columns = dict[str, tuple[str | None, ...]]


def row_blocks(path: Path, keys: Sequence[str], max_bytes: int) -> Iterator[tuple[int, Columns]]:
    """Yield number of the first row and the texts by column, of about `max_bytes` at a time.

    Raises:
        ValueError: the library is not installed, the file is damaged, a column is not there or
            holds no text.

    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path}: reading it needs pyarrow: pip install 'mcore-data[parquet]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            for key in keys:
                if key not in schema.names:
                    names = ", ".join(map(repr, schema.names[:8]))
                    raise ValueError(f"{path}: no column {key!r}; columns are {names}")
                kind = schema.field(key).type
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise ValueError(f"{path}: column {key!r} holds {kind}, not text")
            meta = file.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            rows = max(1, min(65_536, max_bytes * meta.num_rows // max(size, 1)))
            first = 0
            for batch in file.iter_batches(batch_size=rows, columns=list(keys)):
                try:
                    columns = {key: tuple(batch.column(key).to_pylist()) for key in keys}
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}: rows {first} to {first + batch.num_rows - 1}: no UTF-8 ({error})"
                    ) from None
                yield first, columns
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: damaged Parquet file ({reason})") from None

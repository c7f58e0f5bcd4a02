"""Write `.bin/.idx` files as a stream, in constant memory, all or nothing."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mcore_data._files import abandoned, create_temporary, exclusive, fsync_path
from mcore_data.indexed.format import MAX_LENGTH, dtype_code, index_header, sequence_offsets
from mcore_data.indexed.reader import IndexedReader

_CHUNK = 1 << 18  # sequences turned into offsets at a time
_COPIED = 1 << 22  # tokens copied at a time


def _spool(folder: Path) -> BinaryIO:
    """Open a file without a name: the system removes it even after a kill."""
    return tempfile.TemporaryFile(dir=folder)


class IndexedWriter:
    """Writes documents to `PREFIX.bin` and `PREFIX.idx`.

    Nothing is visible under the final names before `finalize`, which replaces files of an
    earlier run; the index comes last, so that a pair with an index is always whole. As a
    context manager it finalises, or after an exception removes what it wrote. Memory does
    not grow with the number of documents.

    Args:
        prefix: path without `.bin` and `.idx`; its directory is created.
        dtype: how ids are stored, see `token_dtype`.
        multimodal: also store a mode per sequence.

    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, multimodal: bool = False) -> None:
        dtype_code(dtype)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self.prefix = Path(prefix)
        self.bin_path = self.prefix.with_name(self.prefix.name + ".bin")
        self.idx_path = self.prefix.with_name(self.prefix.name + ".idx")
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        folder = self.bin_path.parent
        folder.mkdir(parents=True, exist_ok=True)
        for final in (self.bin_path, self.idx_path):
            for path in abandoned(final):
                path.unlink(missing_ok=True)
        self._temporary, self._bin = create_temporary(self.bin_path)
        self._lengths = _spool(folder)
        self._documents = _spool(folder)
        self._modes = _spool(folder) if multimodal else None
        self._documents.write(np.zeros(1, "<i8").tobytes())
        self._open = True

    def add_document(
        self,
        tokens: ArrayLike,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """Append one document: `tokens` [n], cut into sequences of `lengths` (default: one).

        Raises ValueError when the lengths do not sum to n, when an id does not fit the dtype,
        or when `modes` (one per sequence, multimodal writers only) is missing or superfluous.
        """
        values = self._checked(tokens)
        sizes = np.asarray([len(values)] if lengths is None else lengths, np.int64)
        self._write(values, sizes, np.array([len(sizes)], np.int64), modes)

    def add_documents(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike,
        sequences: ArrayLike | None = None,
        modes: ArrayLike | None = None,
    ) -> None:
        """Append many documents: `tokens` back to back, `lengths` [S] of their sequences.

        `sequences` [D] are those of each document (default: one each), `modes` [S] as in
        `add_document`. ValueError as there, and when the sequences do not sum to S.
        """
        sizes = np.asarray(lengths, np.int64)
        counts = np.ones(len(sizes), np.int64) if sequences is None else np.asarray(sequences)
        if counts.sum() != len(sizes) or (len(counts) and counts.min() < 0):
            raise ValueError(
                f"document {self.num_documents}: {len(sizes)} lengths for documents of "
                f"{counts.sum()} sequences in all"
            )
        self._write(self._checked(tokens), sizes, counts.astype(np.int64), modes)

    def append(self, reader: IndexedReader, documents: range | None = None) -> None:
        """Copy documents of another file (default: all), in a range of step 1.

        Memory does not grow with them. ValueError when the file has another dtype, or modes where
        this one has none, or no such documents.
        """
        chosen = range(reader.num_documents) if documents is None else documents
        if chosen.step != 1 or not 0 <= chosen.start <= max(chosen.stop, chosen.start):
            raise ValueError(f"documents {chosen} are no range of step 1")
        if chosen and chosen.stop > reader.num_documents:
            raise ValueError(
                f"{reader.prefix}: documents {chosen.start} to {chosen.stop} asked for, it has "
                f"{reader.num_documents}"
            )
        if reader.dtype != self.dtype:
            raise ValueError(
                f"{reader.prefix} holds {reader.dtype.name}, {self.prefix} is written as "
                f"{self.dtype.name}"
            )
        # Without sequences a file does not tell whether it has modes.
        if len(reader) and (reader.modes is not None) != (self._modes is not None):
            has = "has a mode for each sequence" if reader.modes is not None else "has no modes"
            raise ValueError(f"{reader.prefix} {has}, {self.prefix} is written the other way")
        bounds = reader.document_indices
        start = chosen.start
        while start < chosen.stop:
            # As many documents as fit one step, by the length of their sequences: one at least.
            first = int(bounds[start])
            sizes = np.cumsum(reader.lengths[first : first + _CHUNK], dtype=np.int64)
            last = first + int(np.searchsorted(sizes, _COPIED, side="right"))
            stop = int(np.searchsorted(bounds, last, side="right")) - 1
            stop = min(max(stop, start + 1), chosen.stop)
            self._append(reader, start, stop)
            start = stop

    def _append(self, reader: IndexedReader, start: int, stop: int) -> None:
        bounds = reader.document_indices[start : stop + 1]
        first, last = int(bounds[0]), int(bounds[-1])
        tokens = reader.get_run(first, last)
        if tokens is None:
            tokens = np.concatenate([reader.get(i) for i in range(first, last)])
        lengths = np.asarray(reader.lengths[first:last], np.int64)
        modes: ArrayLike | None = None
        if self._modes is not None:
            modes = [] if reader.modes is None else reader.modes[first:last]
        self._write(tokens, lengths, np.diff(bounds), modes)

    def _checked(self, tokens: ArrayLike) -> NDArray[Any]:
        values = np.asarray(tokens)
        if values.ndim != 1:
            raise ValueError(f"tokens have shape {values.shape}, a document is one-dimensional")
        if values.dtype == self.dtype or not values.size:
            return values.astype(self.dtype, copy=False)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = values.min(), values.max()
            if values.dtype.kind not in "iu" or low < limits.min or high > limits.max:
                raise ValueError(
                    f"document {self.num_documents}: {values.dtype.name} values {low} to {high} "
                    f"do not fit {self.dtype.name} ({limits.min} to {limits.max})"
                )
        return values.astype(self.dtype)

    def _write(
        self,
        values: NDArray[Any],
        lengths: NDArray[np.int64],
        sequences: NDArray[np.int64],
        modes: ArrayLike | None,
    ) -> None:
        if not self._open:
            raise ValueError(f"{self.prefix}: already finalised or aborted")
        if len(lengths) and (lengths.min() < 0 or lengths.max() > MAX_LENGTH):
            raise ValueError(
                f"{self.bin_path}: document {self.num_documents}: sequence lengths "
                f"{lengths.min()} to {lengths.max()}, the format holds 0 to {MAX_LENGTH}"
            )
        if lengths.sum() != len(values):
            raise ValueError(
                f"document {self.num_documents}: sequence lengths sum to {lengths.sum()}, "
                f"there are {len(values)} tokens"
            )
        if (self._modes is not None) != (modes is not None):
            raise ValueError(
                f"document {self.num_documents}: modes are required by a multimodal writer "
                "and refused by any other"
            )
        if self._modes is not None and modes is not None:
            kinds = np.asarray(modes, "<i1")
            if len(kinds) != len(lengths):
                raise ValueError(
                    f"document {self.num_documents}: {len(kinds)} modes for "
                    f"{len(lengths)} sequences"
                )
            self._modes.write(kinds.tobytes())
        self._bin.write(np.ascontiguousarray(values).data)
        self._lengths.write(lengths.astype("<i4").tobytes())
        ends = self.num_sequences + np.cumsum(sequences)
        self._documents.write(ends.astype("<i8").tobytes())
        self.num_sequences += len(lengths)
        self.num_documents += len(sequences)
        self.num_tokens += len(values)

    def finalize(self) -> None:
        """Make `PREFIX.bin`, then `PREFIX.idx`, appear under their names, synced to disk."""
        if not self._open:
            raise ValueError(f"{self.prefix}: already finalised or aborted")
        try:
            self._bin.flush()
            fsync_path(self._temporary)
            index_path, index = create_temporary(self.idx_path)
            try:
                with index:
                    self._write_index(index)
                    index.flush()
                    fsync_path(index_path)
                    self._publish(index_path)
            finally:
                index_path.unlink(missing_ok=True)
        finally:
            self.abort()

    def _publish(self, index_path: Path) -> None:
        folder = self.idx_path.parent
        with exclusive(folder):  # two writers of one prefix may not mix their files
            # An index of an earlier run must never lie beside the new .bin.
            self.idx_path.unlink(missing_ok=True)
            fsync_path(folder)
            self._temporary.replace(self.bin_path)
            fsync_path(folder)
            index_path.replace(self.idx_path)
            fsync_path(folder)

    def _write_index(self, out: BinaryIO) -> None:
        out.write(
            index_header(
                dtype=self.dtype,
                num_sequences=self.num_sequences,
                num_documents=self.num_documents,
            )
        )
        self._lengths.seek(0)
        shutil.copyfileobj(self._lengths, out)
        self._lengths.seek(0)
        start = 0
        while raw := self._lengths.read(4 * _CHUNK):
            lengths = np.frombuffer(raw, "<i4")
            out.write(sequence_offsets(lengths, self.dtype, start).astype("<i8").tobytes())
            start += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        for spool in (self._documents, self._modes):
            if spool is not None:
                spool.seek(0)
                shutil.copyfileobj(spool, out)

    def abort(self) -> None:
        """Drop everything that was written since the writer was opened."""
        self._open = False
        for file in (self._bin, self._lengths, self._documents, self._modes):
            if file is not None:
                file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.finalize()

"""Read `.bin/.idx` files: through a memory map, by positioned reads, from object storage."""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.format import HEADER, IndexHeader, parse_header, sequence_offsets
from mcore_data.indexed.storage import RemoteFile, Storage, is_url

Access = Literal["mmap", "pread", "object"]

_TOKENS: Final = 1 << 22  # tokens that verify looks at, at a time


class _Mapped:
    """The bytes of a file through a memory map."""

    def __init__(self, path: Path) -> None:
        self.size = path.stat().st_size
        self._map: NDArray[np.uint8] = (
            np.memmap(path, mode="r") if self.size else np.empty(0, np.uint8)
        )

    def read(self, dtype: np.dtype[Any], count: int, begin: int) -> NDArray[Any]:
        return np.frombuffer(self._map, dtype, count, begin)


class _Positioned:
    """The bytes of a file through `pread`: no map, each access reads what it asks for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    def read(self, dtype: np.dtype[Any], count: int, begin: int) -> NDArray[Any]:
        wanted, parts = count * dtype.itemsize, []
        while wanted > 0:
            part = os.pread(self._fd, wanted, begin)  # the system may give less at a time
            if not part:
                raise OSError(f"{self._path}: it ends {wanted} bytes too early: it became shorter")
            parts.append(part)
            begin += len(part)
            wanted -= len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)


class IndexedReader:
    """The sequences of `PREFIX.bin` and `PREFIX.idx`, never loaded as a whole.

    Args:
        prefix: path without `.bin` and `.idx`, or an address such as `s3://bucket/corpus`.
        access: how tokens are read. `mmap` (the default for paths) maps the file; `pread` reads
            each sequence when it is asked for and keeps the index in memory, which suits file
            systems over a network; `object` is the one for addresses.
        storage: how object storage is read (default: `Storage()`); for addresses alone.

    Attributes:
        dtype: how tokens are stored.
        lengths: tokens per sequence, int32 [S].
        offsets: byte offset of each sequence in the `.bin`, int64 [S].
        document_indices: 0, then the number of sequences up to the end of each document,
            int64 [D + 1].
        modes: int8 [S] in multimodal files, else None.

    Opening costs the same for any size: it checks the header, the file sizes and the two ends
    of the document array. `get` checks each access, `verify` checks everything.

    Raises:
        ValueError: one line naming the file and the numbers, when the prefix is a directory,
            a file is missing, is no index, has another version, or is truncated.
        OSError: one line naming the address, when object storage does not give what was asked for.

    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        access: Access | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.access: Access = _chosen_access(prefix, access, storage)
        self._storage = storage
        self._bin: _Mapped | _Positioned | RemoteFile | None = None
        self.prefix: str | Path = prefix if is_url(prefix) else Path(prefix)
        self.bin_path: str | Path
        self.idx_path: str | Path
        if isinstance(self.prefix, Path):
            self.bin_path = self.prefix.with_name(self.prefix.name + ".bin")
            self.idx_path = self.prefix.with_name(self.prefix.name + ".idx")
            _check_files(self.prefix, self.idx_path, self.bin_path)
            index = _load_index(self.idx_path, mapped=self.access == "mmap")
        else:
            self.bin_path, self.idx_path = f"{self.prefix}.bin", f"{self.prefix}.idx"
            index = _load_remote_index(self.idx_path, storage or Storage())
        header = parse_header(index[: HEADER.size].tobytes(), str(self.idx_path))
        multimodal = self._check_index_size(header, index.size)
        self.dtype: np.dtype[Any] = header.dtype
        s, d = header.num_sequences, header.num_documents
        cuts = np.cumsum([HEADER.size, 4 * s, 8 * s, 8 * (d + 1)])
        parts = [np.asarray(part) for part in np.split(index, cuts)]
        self.lengths: NDArray[np.int32] = parts[1].view("<i4")
        self.offsets: NDArray[np.int64] = parts[2].view("<i8")
        self.document_indices: NDArray[np.int64] = parts[3].view("<i8")
        self.modes: NDArray[np.int8] | None = parts[4].view("<i1") if multimodal else None
        if self.document_indices[0] != 0 or self.document_indices[-1] != s:
            raise ValueError(
                f"{self.idx_path}: document array runs from {self.document_indices[0]} to "
                f"{self.document_indices[-1]}, it must run from 0 to the {s} sequences"
            )
        self._empty = np.empty(0, self.dtype)
        self._bin = _open_bin(self.bin_path, self.access, storage or Storage())
        self._check_last(self._bin.size)

    def _check_index_size(self, header: IndexHeader, size: int) -> bool:
        """Whether the index holds modes; ValueError when its size is neither of the two."""
        plain, multimodal = header.sizes
        if size not in (plain, multimodal):
            fault = "truncated" if size < plain else "too long"
            raise ValueError(
                f"{self.idx_path}: {fault}, {size} bytes where {header.num_sequences} sequences "
                f"and {header.num_documents} documents take {plain}"
            )
        return size != plain

    def _check_last(self, size: int) -> None:
        if len(self.lengths):
            end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if end > size:
                raise ValueError(
                    f"{self.bin_path}: truncated, {size} bytes where the last of "
                    f"{len(self.lengths)} sequences ends at byte {end}"
                )
            # An index may have gaps; one without any that leaves bytes over is of another file, or
            # says another dtype than was written.
            if (
                end < size
                and int(self.offsets[0]) == 0
                and end == self.num_tokens * self.dtype.itemsize
            ):
                raise ValueError(
                    f"{self.bin_path}: {size} bytes where the {len(self.lengths)} sequences of its "
                    f"index take 0 to {end}: written as another dtype, or the two are no pair"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents (a document is one sequence or several)."""
        return len(self.document_indices) - 1

    @property
    def num_bytes(self) -> int:
        """Size of the `.bin`."""
        return 0 if self._bin is None else self._bin.size

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens `[offset, offset + length)` of sequence `index` as a read-only view.

        `length` None: up to its end. IndexError or ValueError when it lies outside.
        """
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"{self.prefix}: sequence {index} of {len(self.lengths)}")
        total = int(self.lengths[index])
        count = total - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > total:
            raise ValueError(
                f"{self.prefix}: tokens {offset} to {offset + count} of sequence {index}, "
                f"which has {total}"
            )
        width = self.dtype.itemsize
        begin = int(self.offsets[index]) + offset * width
        assert self._bin is not None
        if begin < 0 or begin + count * width > self._bin.size:
            raise ValueError(
                f"{self.bin_path}: {self._bin.size} bytes, sequence {index} is said to lie at "
                f"bytes {begin} to {begin + count * width}"
            )
        return self._bin.read(self.dtype, count, begin) if count else self._empty

    def get_run(self, first: int, stop: int) -> NDArray[Any] | None:
        """Return the tokens of sequences `first` to `stop` - 1 back to back, without copying them.

        None when they do not lie back to back in the file.
        """
        if not 0 <= first <= stop <= len(self.lengths):
            raise IndexError(f"{self.prefix}: sequences {first} to {stop} of {len(self.lengths)}")
        if first == stop:
            return self._empty
        lengths, offsets = self.lengths[first:stop], self.offsets[first:stop]
        begin = int(offsets[0])
        if not np.array_equal(offsets, sequence_offsets(lengths, self.dtype, begin)):
            return None
        count = int(lengths.sum(dtype=np.int64))
        assert self._bin is not None
        if begin < 0 or begin + count * self.dtype.itemsize > self._bin.size:
            return None
        return self._bin.read(self.dtype, count, begin) if count else self._empty

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.get(index)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.get(i) for i in range(len(self)))

    def document(self, index: int) -> NDArray[Any]:
        """Return all tokens of document `index`, its sequences joined."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"{self.prefix}: document {index} of {self.num_documents}")
        first, last = (int(i) for i in self.document_indices[index : index + 2])
        parts = [self.get(i) for i in range(first, last)]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def verify(self, vocab_size: int | None = None) -> None:
        """Check every length, offset and document boundary; ValueError names the first fault.

        Sequences must lie back to back and fill the `.bin`, as every writer of the format leaves
        them: else the two files do not belong together. `vocab_size`: also read every token and
        check that it lies in 0 to vocab_size - 1.
        """
        assert self._bin is not None
        size = self._bin.size
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        for name, wrong in (
            ("has a negative length", self.lengths < 0),
            ("starts before byte 0", self.offsets < 0),
            (f"ends after the {size} bytes of the .bin", ends > size),
            ("does not start where the one before ends", self.offsets[1:] != ends[:-1]),
        ):
            if wrong.any():
                i = int(wrong.argmax()) + len(ends) - len(wrong)
                raise ValueError(
                    f"{self.idx_path}: sequence {i} {name} "
                    f"(offset {self.offsets[i]}, length {self.lengths[i]})"
                )
        filled = int(ends[-1]) if len(ends) else 0
        if filled != size or (len(ends) and self.offsets[0]):
            raise ValueError(
                f"{self.bin_path}: {size} bytes where the {len(ends)} sequences of its index take "
                f"{int(self.offsets[0]) if len(ends) else 0} to {filled}: the files are no pair"
            )
        falls = np.diff(self.document_indices) < 0
        if falls.any():
            i = int(falls.argmax())
            raise ValueError(
                f"{self.idx_path}: document {i} ends before it starts "
                f"({self.document_indices[i + 1]} after {self.document_indices[i]})"
            )
        if vocab_size is not None:
            self._verify_tokens(vocab_size)

    def _verify_tokens(self, vocab_size: int) -> None:
        assert self._bin is not None
        width = self.dtype.itemsize
        for first in range(0, self._bin.size // width, _TOKENS):
            count = min(_TOKENS, self._bin.size // width - first)
            tokens = self._bin.read(self.dtype, count, first * width)
            wrong = (tokens < 0) | (tokens >= vocab_size)
            if wrong.any():
                place = first + int(wrong.argmax())
                sequence = int(np.searchsorted(self.offsets, place * width, side="right")) - 1
                offset = place - int(self.offsets[sequence]) // width
                raise ValueError(
                    f"{self.bin_path}: token {tokens[place - first]} at position {offset} of "
                    f"sequence {sequence} (byte {place * width}) is outside the vocabulary of "
                    f"{vocab_size}"
                )

    def close(self) -> None:
        """Let go of the maps (they vanish once no array taken from them is alive)."""
        if isinstance(self._bin, RemoteFile):
            self._bin.close()
        self._bin = None
        self.lengths = np.empty(0, np.int32)
        self.offsets = np.empty(0, np.int64)
        self.document_indices = np.zeros(1, np.int64)
        self.modes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self.prefix, self.access, self._storage)


def _open(prefix: str | Path, access: Access, storage: Storage | None) -> IndexedReader:
    return IndexedReader(prefix, access=access, storage=storage)


def _chosen_access(prefix: str | Path, access: Access | None, storage: Storage | None) -> Access:
    if access not in (None, "mmap", "pread", "object"):
        raise ValueError(f"access is {access!r}, it can be 'mmap', 'pread' or 'object'")
    if is_url(prefix):
        if access in ("mmap", "pread"):
            raise ValueError(f"{prefix}: access is {access!r}, an address is read as 'object'")
        return "object"
    if access == "object" or storage is not None:
        what = "access is 'object'" if access == "object" else "storage is given"
        raise ValueError(f"{prefix}: {what}, for a path; that is for addresses such as s3://…")
    return access or "mmap"


def _check_files(prefix: Path, idx_path: Path, bin_path: Path) -> None:
    # Megatron-LM keeps its caches in a folder named as the prefix: that is no mistake.
    if prefix.is_dir() and not idx_path.is_file():
        found = sorted(path.with_suffix("") for path in prefix.glob("*.idx"))
        hint = f", for example {found[0]}" if found else " (it holds no .idx)"
        raise ValueError(f"{prefix} is a directory; give the prefix of a .bin/.idx pair{hint}")
    for path in (idx_path, bin_path):
        if path.is_dir():
            raise ValueError(f"{path}: it is a directory, no file")
        if not path.is_file():
            hint = ""
            if prefix.suffix in (".idx", ".bin") and prefix.is_file():
                hint = f"; give the prefix {prefix.with_suffix('')}"
            raise ValueError(f"{path}: no such file{hint}")


def _load_index(path: Path, *, mapped: bool) -> NDArray[np.uint8]:
    if not mapped:
        return np.fromfile(path, np.uint8)
    if not path.stat().st_size:  # which cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, mode="r")


def _load_remote_index(url: str, storage: Storage) -> NDArray[np.uint8]:
    file = RemoteFile(url, storage)
    try:
        if storage.cache_dir is None:
            return np.frombuffer(file.read_all(), np.uint8)
        return _load_index(file.cached(Path(storage.cache_dir)), mapped=True)
    finally:
        file.close()


def _open_bin(
    path: str | Path, access: Access, storage: Storage
) -> _Mapped | _Positioned | RemoteFile:
    if not isinstance(path, Path):
        return RemoteFile(path, storage)
    return _Mapped(path) if access == "mmap" else _Positioned(path)

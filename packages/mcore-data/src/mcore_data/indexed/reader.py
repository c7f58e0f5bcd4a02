"""Read `.bin/.idx` files through a memory map."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mcore_data.indexed.format import HEADER, IndexHeader, parse_header


class IndexedReader:
    """The sequences of `PREFIX.bin` and `PREFIX.idx`, mapped, never loaded.

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

    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.bin_path = self.prefix.with_name(self.prefix.name + ".bin")
        self.idx_path = self.prefix.with_name(self.prefix.name + ".idx")
        self._check_files()
        index = np.memmap(self.idx_path, mode="r") if self.idx_path.stat().st_size else None
        raw = b"" if index is None else index[: HEADER.size].tobytes()
        header = parse_header(raw, str(self.idx_path))
        assert index is not None
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
        size = self.bin_path.stat().st_size
        self._bin: NDArray[np.uint8] = (
            np.memmap(self.bin_path, mode="r") if size else np.empty(0, np.uint8)
        )
        self._check_last(size)

    def _check_files(self) -> None:
        # Megatron-LM keeps its caches in a folder named as the prefix: that is no mistake.
        if self.prefix.is_dir() and not self.idx_path.is_file():
            found = sorted(path.with_suffix("") for path in self.prefix.glob("*.idx"))
            hint = f", for example {found[0]}" if found else " (it holds no .idx)"
            raise ValueError(
                f"{self.prefix} is a directory; give the prefix of a .bin/.idx pair{hint}"
            )
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                hint = ""
                if self.prefix.suffix in (".idx", ".bin") and self.prefix.is_file():
                    hint = f"; give the prefix {self.prefix.with_suffix('')}"
                raise ValueError(f"{path}: no such file{hint}")

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

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents (a document is one sequence or several)."""
        return len(self.document_indices) - 1

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
        if begin < 0 or begin + count * width > self._bin.size:
            raise ValueError(
                f"{self.bin_path}: {self._bin.size} bytes, sequence {index} is said to lie at "
                f"bytes {begin} to {begin + count * width}"
            )
        return np.frombuffer(self._bin, self.dtype, count, begin) if count else self._empty

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

    def verify(self) -> None:
        """Check every length, offset and document boundary; ValueError names the first fault."""
        size = self._bin.size
        ends = self.offsets + self.lengths.astype(np.int64) * self.dtype.itemsize
        for name, wrong in (
            ("has a negative length", self.lengths < 0),
            ("starts before byte 0", self.offsets < 0),
            (f"ends after the {size} bytes of the .bin", ends > size),
        ):
            if wrong.any():
                i = int(wrong.argmax())
                raise ValueError(
                    f"{self.idx_path}: sequence {i} {name} "
                    f"(offset {self.offsets[i]}, length {self.lengths[i]})"
                )
        falls = np.diff(self.document_indices) < 0
        if falls.any():
            i = int(falls.argmax())
            raise ValueError(
                f"{self.idx_path}: document {i} ends before it starts "
                f"({self.document_indices[i + 1]} after {self.document_indices[i]})"
            )

    def close(self) -> None:
        """Let go of the maps (they vanish once no array taken from them is alive)."""
        self._bin = np.empty(0, np.uint8)
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

    def __reduce__(self) -> tuple[type["IndexedReader"], tuple[Path]]:
        return type(self), (self.prefix,)

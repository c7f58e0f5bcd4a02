"""The `.bin`/`.idx` format as pure functions: no file is touched here.

`PREFIX.bin` holds token values back to back. `PREFIX.idx`, all little-endian:

    offset  size  content
    0       9     magic, `MMIDIDX` and two NULs
    9       8     version, uint64 = 1
    17      1     dtype code, uint8
    18      8     number of sequences S, uint64
    26      8     length D of the document array (real documents + 1), uint64
    34      4*S   tokens per sequence, int32
    ...     8*S   byte offset of each sequence in the .bin, int64
    ...     8*D   number of sequences before each document and after the last, int64
    ...     S     mode of each sequence, int8 (multimodal files only)
"""

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
MAX_LENGTH: Final = 2**31 - 1
DTYPES: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """What the first 34 bytes of an `.idx` say."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the whole `.idx` without and with the mode of each sequence."""
        plain = HEADER.size + 12 * self.num_sequences + 8 * (self.num_documents + 1)
        return plain, plain + self.num_sequences


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that stores ids below `vocab_size`: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def dtype_code(dtype: DTypeLike) -> int:
    """Return the code of `dtype` in the header; ValueError if the format has none."""
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, known in DTYPES.items():
        if known == wanted:
            return code
    names = ", ".join(known.name for known in DTYPES.values())
    raise ValueError(f"dtype {np.dtype(dtype).name} has no code in the .idx format; it has {names}")


def index_header(*, dtype: DTypeLike, num_sequences: int, num_documents: int) -> bytes:
    """Return the 34-byte header; `num_documents` counts real documents."""
    return HEADER.pack(MAGIC, VERSION, dtype_code(dtype), num_sequences, num_documents + 1)


def parse_header(raw: bytes, where: str) -> IndexHeader:
    """Read a header; ValueError, naming the file `where`, when it is not one."""
    if not raw.startswith(MAGIC):
        raise ValueError(f"{where}: starts with {raw[:9]!r}, an index starts with {MAGIC!r}")
    if len(raw) < HEADER.size:
        raise ValueError(f"{where}: truncated, {len(raw)} bytes and its header has {HEADER.size}")
    _, version, code, num_sequences, num_entries = HEADER.unpack(raw[: HEADER.size])
    if version != VERSION:
        raise ValueError(f"{where}: version {version}, this reader knows version {VERSION}")
    if code not in DTYPES:
        raise ValueError(f"{where}: dtype code {code}, known codes are 1 to {max(DTYPES)}")
    if num_entries < 1:
        raise ValueError(f"{where}: document array of length 0, it has at least its leading 0")
    return IndexHeader(
        dtype=DTYPES[code], num_sequences=num_sequences, num_documents=num_entries - 1
    )


def sequence_offsets(
    lengths: NDArray[np.integer[Any]], dtype: DTypeLike, start: int = 0
) -> NDArray[np.int64]:
    """Return the byte offset of each sequence, int64 [S], the first at byte `start`."""
    sizes = np.asarray(lengths, np.int64) * np.dtype(dtype).itemsize
    offsets = np.empty(len(sizes), np.int64)
    if len(sizes):
        offsets[0] = start
        np.cumsum(sizes[:-1], out=offsets[1:])
        offsets[1:] += start
    return offsets


def build_index(
    lengths: NDArray[np.integer[Any]],
    document_indices: NDArray[np.integer[Any]],
    dtype: DTypeLike,
    modes: NDArray[np.integer[Any]] | None = None,
) -> bytes:
    """Return a whole `.idx` file.

    `lengths` [S] are tokens per sequence; `document_indices` [D] is 0 followed by the number
    of sequences up to the end of each document; `modes` [S] only for multimodal files.
    """
    header = index_header(
        dtype=dtype, num_sequences=len(lengths), num_documents=len(document_indices) - 1
    )
    parts = [
        np.asarray(lengths, "<i4"),
        sequence_offsets(lengths, dtype).astype("<i8"),
        np.asarray(document_indices, "<i8"),
    ]
    if modes is not None:
        parts.append(np.asarray(modes, "<i1"))
    return header + b"".join(part.tobytes() for part in parts)

"""Describe an indexed file in numbers."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_data.indexed import IndexedReader


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers of an indexed file; lengths are tokens per sequence."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    multimodal: bool
    shortest: int
    median: float
    mean: float
    longest: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-able."""
        return asdict(self)


def summarise(prefix: str | Path) -> Summary:
    """Return the numbers of the file, after checking every entry of its index.

    ValueError names the first fault.
    """
    with IndexedReader(prefix) as reader:
        reader.verify()
        lengths = np.array(reader.lengths) if len(reader) else np.zeros(1, np.int32)
        return Summary(
            prefix=str(prefix),
            dtype=reader.dtype.name,
            documents=reader.num_documents,
            sequences=len(reader),
            tokens=reader.num_tokens,
            bin_bytes=reader.num_bytes,
            multimodal=reader.modes is not None,
            shortest=int(lengths.min()),
            median=float(np.median(lengths)),
            mean=float(lengths.mean()),
            longest=int(lengths.max()),
        )

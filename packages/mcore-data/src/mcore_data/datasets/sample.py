"""What a dataset yields, and the arithmetic of document boundaries inside a sample.

S: tokens of a sample. N: segments (parts of documents that may attend to each other).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One training sample.

    Attributes:
        tokens: input ids, int64 [S].
        labels: the id to predict at each position, int64 [S].
        loss_mask: 1 where the label counts in the loss, else 0, float32 [S].
        positions: position ids, int64 [S].
        cu_seqlens: bounds of the segments, int32 [N + 1], from 0 to S; a token attends only
            within its segment.

    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    positions: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]

    def extra(self) -> Mapping[str, NDArray[Any]]:
        """Return what samples of a kind hold beside these, by name; one shape for all of them."""
        return {}


class SampleSource(Protocol):
    """Anything with a length whose items are samples of one size."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return sample `index`, the same one at every call."""
        ...


def segment_bounds(
    tokens: NDArray[np.integer[Any]], eod_id: int, size: int | None = None
) -> NDArray[np.int32]:
    """Return the bounds int32 [N + 1] of the documents in `tokens`, from 0 to `size`.

    A document ends with its EOD token. An EOD at the very end opens no further document, and
    two in a row make a document of one token: no segment is ever empty. `size` (default: the
    number of tokens) counts padding that follows; it is never searched for EOD tokens.
    """
    total = len(tokens) if size is None else size
    starts = np.flatnonzero(tokens[: max(total - 1, 0)] == eod_id) + 1
    return np.concatenate(([0], starts, [total])).astype(np.int32)


def segment_positions(cu_seqlens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the position of every token within its segment, int64 [S]."""
    lengths = np.diff(cu_seqlens)
    total = int(cu_seqlens[-1])
    return np.arange(total, dtype=np.int64) - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths)

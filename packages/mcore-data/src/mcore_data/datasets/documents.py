"""Documents as samples of their own length: conversations, pairs of question and answer, texts.

n: tokens of a document.
"""

from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.gpt_index import as_numbers
from mcore_data.datasets.sample import Sample
from mcore_data.indexed import IndexedReader

LEARNED = 1
"""Mode of a sequence whose tokens bear loss, in files of conversations; 0 for the others."""


def document_lengths(reader: IndexedReader) -> NDArray[np.int64]:
    """Return the tokens of every document of the file, int64 [D]."""
    sums = np.concatenate([[0], np.cumsum(reader.lengths, dtype=np.int64)])
    return np.diff(sums[reader.document_indices])


class VariableSource(Protocol):
    """Samples of different lengths."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of every sample, int64 [*]."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return sample `index`, the same one at every call."""
        ...


class DocumentDataset:
    """One sample of n - 1 positions for every document of n tokens.

    In a file with modes (as `preprocess_chat` writes) only tokens of sequences of mode 1 bear
    loss, as labels; in any other all do.

    Attributes:
        lengths: positions of every sample, int64 [*].
        documents: the document of every sample, int64 [*].
        left_out: documents without a sample: too short, too long, or without a token to learn.
        truncated: samples that were cut.

    Args:
        reader: the tokens.
        documents: document numbers to use (default: all).
        max_length: most positions of a sample.
        too_long: what becomes of longer documents: they are cut at the end, left out, or refused.

    Raises:
        ValueError: no sample is left, or a document is too long and that is refused.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        max_length: int,
        too_long: Literal["truncate", "drop", "error"] = "truncate",
    ) -> None:
        if max_length < 1 or too_long not in ("truncate", "drop", "error"):
            raise ValueError(
                f"max_length {max_length} must be at least 1 and too_long {too_long!r} one of "
                "truncate, drop and error"
            )
        self.reader = reader
        self.max_length = max_length
        count = reader.num_documents
        chosen = as_numbers(range(count) if documents is None else documents, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count):
            raise ValueError(
                f"{reader.prefix}: documents {chosen.min()} to {chosen.max()} asked for, it has "
                f"{count}"
            )
        lengths = document_lengths(reader)[chosen] - 1
        longer = lengths > max_length
        if too_long == "error" and longer.any():
            place = int(longer.argmax())
            raise ValueError(
                f"{reader.prefix}: document {chosen[place]} has {lengths[place] + 1} tokens, "
                f"max_length {max_length} takes {max_length + 1}"
            )
        keep = (lengths > 0) & (self._first_learned()[chosen] <= max_length)
        if too_long == "drop":
            keep &= ~longer
        self.documents: NDArray[np.int64] = chosen[keep]
        self.lengths: NDArray[np.int64] = np.minimum(lengths[keep], max_length)
        self.left_out = int((~keep).sum())
        self.truncated = int(longer[keep].sum())
        if not len(self.documents):
            raise ValueError(
                f"{reader.prefix}: none of {len(chosen)} documents gives a sample (at least 2 "
                f"tokens, one of them to learn within {max_length + 1})"
            )

    def _first_learned(self) -> NDArray[np.int64]:
        """Return the place of the first token of every document that bears loss as a label."""
        bounds = self.reader.document_indices
        first = np.ones(self.reader.num_documents, np.int64)
        if self.reader.modes is None:
            return first
        never = np.iinfo(np.int64).max
        ends = np.cumsum(self.reader.lengths, dtype=np.int64)
        starts = ends - self.reader.lengths
        owner = np.repeat(np.arange(self.reader.num_documents), np.diff(bounds))
        begin = starts[np.minimum(bounds[:-1], max(len(starts) - 1, 0))] if len(starts) else starts
        place = np.maximum(starts - begin[owner], 1)  # the first token of all is nobody's label
        usable = (self.reader.modes == LEARNED) & (ends - begin[owner] > place)
        first[:] = never
        np.minimum.at(first, owner[usable], place[usable])
        return first

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.reader.prefix}: sample {index} of {len(self)}")
        document, size = int(self.documents[index]), int(self.lengths[index])
        text = self.reader.document(document)[: size + 1].astype(np.int64)
        mask = np.ones(size, np.float32)
        if self.reader.modes is not None:
            first, last = (int(i) for i in self.reader.document_indices[document : document + 2])
            learned = self.reader.modes[first:last] == LEARNED
            mask[:] = np.repeat(learned, self.reader.lengths[first:last])[1 : size + 1]
        return Sample(
            tokens=text[:-1],
            labels=text[1:],
            loss_mask=mask,
            positions=np.arange(size, dtype=np.int64),
            cu_seqlens=np.array([0, size], np.int32),
        )

"""Preference pairs: one prompt, an answer that is preferred and one that is not.

In the file a pair is a document of three sequences, prompt, chosen and rejected answer, with the
modes `PROMPT`, `CHOSEN` and `REJECTED`; the prompt is stored once.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.gpt_index import as_numbers
from mcore_data.datasets.sample import Sample
from mcore_data.indexed import IndexedReader, IndexedWriter

PROMPT: Final = 0
CHOSEN: Final = 1
REJECTED: Final = 2
_MODES: Final = (PROMPT, CHOSEN, REJECTED)


def add_preference(
    writer: IndexedWriter,
    prompt: Sequence[int] | NDArray[Any],
    chosen: Sequence[int] | NDArray[Any],
    rejected: Sequence[int] | NDArray[Any],
) -> None:
    """Write a pair as a document of a multimodal writer; ValueError when a part is empty."""
    parts = [np.asarray(part, np.int64) for part in (prompt, chosen, rejected)]
    lengths = [len(part) for part in parts]
    if not all(lengths):
        raise ValueError(f"prompt, chosen and rejected have {lengths} tokens, each must have some")
    writer.add_document(np.concatenate(parts), lengths, modes=list(_MODES))


class PreferenceDataset:
    """Pairs, each as a sample of two segments: prompt and chosen, then prompt and rejected.

    Only the answers bear loss. The two segments cannot see each other and have positions from 0;
    packed (`PackedDataset`) or in steps by tokens (`TokenBatchLoader`) they stay side by side, so
    that segments 2 k and 2 k + 1 of a micro-batch are a pair.

    Attributes:
        lengths: positions of every pair, both segments together, int64 [*].
        left_out: pairs without a sample because an answer is too long.
        truncated: pairs whose prompt was cut.

    Args:
        reader: the tokens.
        documents: document numbers to use (default: all).
        max_length: most positions of one segment. Longer ones lose the beginning of the prompt, of
            which both keep the same; where an answer alone is longer the pair is left out.

    Raises:
        ValueError: the file holds no pairs, or none is left.

    """

    def __init__(
        self,
        reader: IndexedReader,
        documents: range | ArrayLike | None = None,
        *,
        max_length: int,
    ) -> None:
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, the least is 1")
        count = reader.num_documents
        chosen = as_numbers(range(count) if documents is None else documents, np.int64)
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= count):
            raise ValueError(
                f"{reader.prefix}: documents {chosen.min()} to {chosen.max()} asked for, it has "
                f"{count}"
            )
        bounds = reader.document_indices
        threes = bool((np.diff(bounds) == len(_MODES)).all())
        if not threes or reader.modes is None or (reader.modes.reshape(-1, 3) != _MODES).any():
            raise ValueError(
                f"{reader.prefix}: it holds no preference pairs, whose documents are prompt, "
                "chosen and rejected with the modes 0, 1 and 2"
            )
        sizes = reader.lengths.astype(np.int64).reshape(-1, 3)[chosen]
        longest = sizes[:, 1:].max(axis=1, initial=0)
        # One token of the prompt at least: the first of the answer is its label.
        kept = np.minimum(sizes[:, 0], max_length + 1 - longest)
        keep = kept >= 1
        if not keep.any():
            raise ValueError(
                f"{reader.prefix}: none of {len(chosen)} pairs has answers of at most {max_length} "
                "tokens"
            )
        self.reader = reader
        self.max_length = max_length
        self.documents: NDArray[np.int64] = chosen[keep]
        self.prompts: NDArray[np.int64] = kept[keep]
        self.lengths: NDArray[np.int64] = 2 * (kept[keep] - 1) + sizes[keep, 1:].sum(axis=1)
        self.left_out = int((~keep).sum())
        self.truncated = int((kept < sizes[:, 0])[keep].sum())

    def __len__(self) -> int:
        return len(self.documents)

    def pair(self, index: int) -> tuple[Sample, Sample]:
        """Return pair `index`: the sample of the chosen answer and that of the rejected one."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.reader.prefix}: pair {index} of {len(self)}")
        first = int(self.reader.document_indices[self.documents[index]])
        size = int(self.prompts[index])
        prompt = self.reader.get(first)[-size:]
        return _answered(prompt, self.reader.get(first + 1)), _answered(
            prompt, self.reader.get(first + 2)
        )

    def __getitem__(self, index: int) -> Sample:
        chosen, rejected = self.pair(index)
        bounds = np.cumsum([0, len(chosen.tokens), len(rejected.tokens)])
        return Sample(
            tokens=np.concatenate([chosen.tokens, rejected.tokens]),
            labels=np.concatenate([chosen.labels, rejected.labels]),
            loss_mask=np.concatenate([chosen.loss_mask, rejected.loss_mask]),
            positions=np.concatenate([chosen.positions, rejected.positions]),
            cu_seqlens=bounds.astype(np.int32),
        )


def _answered(prompt: NDArray[Any], answer: NDArray[Any]) -> Sample:
    text = np.concatenate([prompt, answer]).astype(np.int64)
    size = len(text) - 1
    return Sample(
        tokens=text[:-1],
        labels=text[1:],
        loss_mask=(np.arange(size) >= len(prompt) - 1).astype(np.float32),
        positions=np.arange(size, dtype=np.int64),
        cu_seqlens=np.array([0, size], np.int32),
    )


def collate_pairs(
    pairs: Sequence[tuple[Sample, Sample]],
    sample_ids: Sequence[int],
    *,
    pad_id: int = 0,
    multiple: int = 1,
) -> dict[str, NDArray[Any]]:
    """Stack n pairs into rows of one length: all chosen, then all rejected in the same order.

    Returns tokens, labels, positions int64 [2 n, S] and loss_mask float32 [2 n, S] with S the
    longest row, rounded up to a multiple of `multiple`; lengths int64 [2 n], cu_seqlens int32 of
    the flattened rows (padding is a segment of its own) and sample_ids int64 [n].
    """
    rows = [pair[side] for side in (0, 1) for pair in pairs]
    lengths = np.array([len(row.tokens) for row in rows], np.int64)
    size = -(-int(lengths.max()) // multiple) * multiple
    shape = (len(rows), size)
    tokens, labels = np.full((2, *shape), pad_id, np.int64)
    loss_mask = np.zeros(shape, np.float32)
    bounds = [0]
    for k, row in enumerate(rows):
        count = len(row.tokens)
        tokens[k, :count], labels[k, :count] = row.tokens, row.labels
        loss_mask[k, :count] = row.loss_mask
        bounds += [k * size + count, (k + 1) * size] if count < size else [(k + 1) * size]
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "positions": np.tile(np.arange(size, dtype=np.int64), (len(rows), 1)),
        "lengths": lengths,
        "cu_seqlens": np.array(bounds, np.int32),
        "sample_ids": np.array(sample_ids, np.int64),
    }

"""Short samples packed into samples of one length, isolated from each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.documents import VariableSource
from mcore_data.datasets.sample import Sample


def first_fit_decreasing(lengths: Sequence[int] | NDArray[Any], capacity: int) -> list[list[int]]:
    """Return which items go into each bin: the longest first, each into the first bin with room.

    Items of equal length keep their order. All of one length are placed at once, so the cost grows
    with the number of different lengths, not with the number of items. ValueError for an item
    longer than the capacity or shorter than 1.
    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and not 1 <= sizes.min() <= sizes.max() <= capacity:
        raise ValueError(
            f"lengths {sizes.min()} to {sizes.max()} must lie in 1 to the capacity {capacity}"
        )
    order = np.argsort(-sizes, kind="stable")
    falling = -sizes[order]
    room: NDArray[np.int64] = np.empty(0, np.int64)
    bins: list[list[int]] = []
    start = 0
    while start < len(order):
        size = -int(falling[start])
        stop = int(np.searchsorted(falling, -size, side="right"))
        # First fit of equal items: each bin with room takes all it can before the next one.
        fits = np.flatnonzero(room >= size)
        taken = np.minimum(np.cumsum(room[fits] // size), stop - start)
        taken = np.diff(taken, prepend=0)
        fits, taken = fits[taken > 0], taken[taken > 0]
        rest, each = stop - start - int(taken.sum()), capacity // size
        new = [each] * (rest // each) + ([rest % each] if rest % each else [])
        fits = np.concatenate([fits, np.arange(len(bins), len(bins) + len(new))])
        taken = np.concatenate([taken, np.array(new, np.int64)])
        room = np.concatenate([room, np.full(len(new), capacity, np.int64)])
        bins += [[] for _ in new]
        room[fits] -= taken * size
        for place, count in zip(fits.tolist(), taken.tolist(), strict=True):
            bins[place] += order[start : start + count].tolist()
            start += count
    return bins


class PackedDataset:
    """Samples of one length, each filled with whole samples of `source` that cannot see each other.

    Which go together is decided once, by first-fit-decreasing. Every packed sample is a segment of
    its own in `cu_seqlens`, with positions from 0; padding is a last segment without loss.

    Attributes:
        bins: numbers of the source's samples in each packed one.
        efficiency: share of positions that are no padding.

    Args:
        source: samples of at most `seq_length` positions.
        seq_length: positions of a packed sample.
        align: pad every segment to a multiple of this (twice the context-parallel size, so that
            each rank gets two equal parts of every segment).
        pad_id: id of padding.

    Raises:
        ValueError: a sample does not fit, or `align` does not divide `seq_length`.

    """

    def __init__(
        self, source: VariableSource, *, seq_length: int, align: int = 1, pad_id: int = 0
    ) -> None:
        if align < 1 or seq_length % align:
            below = seq_length // align * align if align > 0 else seq_length
            raise ValueError(f"align {align} must divide seq_length {seq_length}; nearest: {below}")
        padded = -(-source.lengths // align) * align
        if len(padded) and padded.max() > seq_length:
            place = int(padded.argmax())
            raise ValueError(
                f"sample {place} has {source.lengths[place]} positions, with align {align} it "
                f"takes {padded[place]} of seq_length {seq_length}"
            )
        self.source = source
        self.seq_length = seq_length
        self.align = align
        self.pad_id = pad_id
        self.bins = first_fit_decreasing(padded, seq_length)
        self.efficiency = float(source.lengths.sum()) / max(len(self.bins) * seq_length, 1)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"packed sample {index} of {len(self)}")
        size = self.seq_length
        tokens, labels = np.full((2, size), self.pad_id, np.int64)
        loss_mask = np.zeros(size, np.float32)
        positions = np.zeros(size, np.int64)
        bounds, begin = [0], 0
        for number in self.bins[index]:
            part = self.source[number]
            end = begin + len(part.tokens)
            tokens[begin:end], labels[begin:end] = part.tokens, part.labels
            loss_mask[begin:end] = part.loss_mask
            bounds += [begin + int(bound) for bound in part.cu_seqlens[1:-1]]
            begin += -(-len(part.tokens) // self.align) * self.align
            positions[end - len(part.tokens) : end] = part.positions
            positions[end:begin] = np.arange(begin - end) + int(part.positions[-1]) + 1
            bounds.append(begin)
        if begin < size:
            positions[begin:] = np.arange(size - begin)
            bounds.append(size)
        return Sample(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            positions=positions,
            cu_seqlens=np.array(bounds, np.int32),
        )

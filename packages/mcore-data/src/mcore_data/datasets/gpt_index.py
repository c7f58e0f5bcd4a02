"""Which tokens make up sample i of a GPT dataset: three index arrays.

The documents, repeated once per epoch and shuffled, form one stream of tokens that is cut into
samples of equal length; the samples are then shuffled. The construction, and so the order of
samples for a given seed, is Megatron-LM's. Long indices are built by loops that numba compiles,
where it is installed; the result is the same to the last bit.

E epochs, D documents of the split, N samples.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets import compiled

# When the last epoch gives fewer than this part of an epoch's samples, it is shuffled apart, so
# that no sample of the last epoch comes before the earlier epochs are finished.
_SEPARATE_BELOW: Final = 0.80
_MAX_INT32: Final = 2**31 - 1
_BLOCK: Final = 1 << 18  # documents whose ends are held at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class GPTIndex:
    """The index arrays.

    Attributes:
        documents: order of the documents, int32 [E * D], entries are sequence numbers.
        samples: where each sample starts, [N + 1, 2]: position in `documents` and token
            offset in that document; sample i ends where i + 1 starts.
        shuffle: sample shown as the i-th, uint32 [N] (int64 when N needs it).

    """

    documents: NDArray[np.int32]
    samples: NDArray[np.integer[Any]]
    shuffle: NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    num_epochs: int
    separate_last: bool
    num_before_last: int  # samples that lie wholly before the last epoch


def _plan(epoch_tokens: int, seq_length: int, num_samples: int | None, extra: int) -> _Plan:
    if num_samples is None:
        num_epochs = 1
    else:
        num_epochs = max(1, -(-(num_samples * seq_length + extra) // epoch_tokens))
    if num_epochs == 1 or num_samples is None:
        return _Plan(num_epochs=1, separate_last=False, num_before_last=0)
    before = ((num_epochs - 1) * epoch_tokens - extra) // seq_length
    per_epoch = (epoch_tokens - extra) // seq_length
    separate = num_samples - before < int(_SEPARATE_BELOW * per_epoch)
    return _Plan(num_epochs=num_epochs, separate_last=separate, num_before_last=before)


class _NumpyShuffler:
    """The stream of shuffles of a seed; of 64-bit entries, which numpy shuffles fastest."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.RandomState(seed)

    def shuffle(self, values: NDArray[Any]) -> None:
        wide = values.astype(np.int64)
        self._random.shuffle(wide)
        values[:] = wide


def _compiled(num_entries: int) -> bool:
    return compiled.WORTH_COMPILING <= num_entries < _MAX_INT32 and compiled.available()


def _document_order(
    documents: NDArray[np.int32], plan: _Plan, shuffler: _NumpyShuffler | compiled.Shuffler
) -> NDArray[np.int32]:
    order = np.tile(documents, plan.num_epochs)
    first = len(order) - len(documents) if plan.separate_last else len(order)
    shuffler.shuffle(order[:first])
    shuffler.shuffle(order[first:])
    return order


def _sample_starts(
    lengths: NDArray[np.int32],
    order: NDArray[np.int32],
    *,
    total: int,
    seq_length: int,
    extra: int,
    drop_last: bool,
) -> NDArray[np.integer[Any]]:
    """Cut the stream of `total` tokens in `order` [E * D] at every multiple of seq_length."""
    num = (total - extra) // seq_length if drop_last else -(-(total - extra) // seq_length)
    if _compiled(len(order)):
        starts = compiled.sample_starts(lengths, order, seq_length, extra, num)
        if num * seq_length > total - extra:
            last = len(order) - 1
            while not lengths[order[last]]:
                last -= 1
            starts[num] = last, lengths[order[last]] - extra
        return starts
    starts = np.empty((num + 1, 2), np.int32 if len(order) <= _MAX_INT32 else np.int64)
    starts[0] = 0
    last_cut = min(num * seq_length, total - extra)
    row, before = 1, 0
    for first in range(0, len(order), _BLOCK):
        sizes = lengths.take(order[first : first + _BLOCK], mode="clip")
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += before
        before = int(ends[-1])
        # With the extra token a boundary names the token that two samples share; without it, it
        # lies behind the last token of the sample before, in that token's document.
        stop = num + 1 if last_cut < before + 1 - extra else -(-(before + 1 - extra) // seq_length)
        if stop <= row:
            continue
        cuts = np.minimum(np.arange(row, stop, dtype=np.int64) * seq_length, last_cut)
        position = np.searchsorted(ends, cuts, side="right" if extra else "left")
        starts[row:stop, 0] = position + first
        starts[row:stop, 1] = cuts - (ends[position] - sizes[position])
        row = stop
    return starts


def _shuffled(
    num: int, first: int, shuffler: _NumpyShuffler | compiled.Shuffler
) -> NDArray[np.integer[Any]]:
    """Shuffle 0 to `first` and `first` to `num` apart (`first` = `num`: everything at once)."""
    dtype = np.uint32 if num < np.iinfo(np.uint32).max - 1 else np.int64
    order: NDArray[np.integer[Any]] = np.arange(num, dtype=dtype)
    shuffler.shuffle(order[:first])
    shuffler.shuffle(order[first:])
    return order


def num_epoch_samples(
    num_tokens: int, seq_length: int, *, extra_token: bool = True, drop_last: bool = True
) -> int:
    """Return how many samples documents of `num_tokens` give in one epoch."""
    rest = max(num_tokens - int(extra_token), 0)
    return rest // seq_length if drop_last else -(-rest // seq_length)


def build_gpt_index(
    lengths: NDArray[np.integer[Any]],
    documents: NDArray[np.integer[Any]],
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra_token: bool = True,
    drop_last: bool = True,
) -> GPTIndex:
    """Build the index arrays; a pure function of its arguments.

    Args:
        lengths: tokens of every sequence of the file [*].
        documents: sequence numbers of the split [D].
        seq_length: tokens of a sample.
        num_samples: least number of samples, by as many epochs as it takes; None: one epoch.
        seed: of numpy's RandomState, whose stream is frozen.
        extra_token: a sample has seq_length + 1 tokens and shares the last with the next, so
            that every position has a label.
        drop_last: leave out the last sample when it is shorter than the others.

    Raises:
        ValueError: when the documents have no tokens, or fewer than one sample needs.

    """
    if seq_length < 1 or (num_samples is not None and num_samples < 1):
        raise ValueError(
            f"seq_length {seq_length} and num_samples {num_samples} must be at least 1"
        )
    chosen = np.asarray(documents, np.int32)
    epoch_tokens = int(lengths[chosen].sum(dtype=np.int64))
    extra = int(extra_token)
    least = seq_length + extra if num_samples is None and drop_last else 1 + extra
    if epoch_tokens < least:
        raise ValueError(
            f"{len(chosen)} documents with {epoch_tokens} tokens hold no sample of seq_length "
            f"{seq_length}, which takes {least}"
        )
    plan = _plan(epoch_tokens, seq_length, num_samples, extra)
    fast = _compiled(plan.num_epochs * len(chosen))
    shuffler = compiled.Shuffler(seed) if fast else _NumpyShuffler(seed)
    order = _document_order(chosen, plan, shuffler)
    total = plan.num_epochs * epoch_tokens
    starts = _sample_starts(
        np.asarray(lengths, np.int32),
        order,
        total=total,
        seq_length=seq_length,
        extra=extra,
        drop_last=drop_last,
    )
    num = len(starts) - 1
    shuffle = _shuffled(num, plan.num_before_last if plan.separate_last else num, shuffler)
    return GPTIndex(documents=order, samples=starts, shuffle=shuffle)

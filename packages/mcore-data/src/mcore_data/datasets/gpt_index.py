"""Which tokens make up sample i of a GPT dataset: three index arrays.

The documents, repeated once per epoch and shuffled, form one stream of tokens that is cut into
samples of equal length; the samples are then shuffled. The construction, and so the order of
samples for a given seed, is Megatron-LM's. Long indices are built by loops that numba compiles,
where it is installed; the result is the same to the last bit.

E epochs, D documents of the split, N samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets import compiled

# When the last epoch gives fewer than this part of an epoch's samples, it is shuffled apart, so
# that no sample of the last epoch comes before the earlier epochs are finished.
_SEPARATE_BELOW: Final = 0.80
_MAX_INT32: Final = 2**31 - 1
_BLOCK: Final = 1 << 14  # documents whose ends are held at a time, near the processor


T = TypeVar("T", bound=np.integer[Any])


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


@dataclass(frozen=True, kw_only=True)
class _Cuts:
    """How a stream of tokens is cut: at every multiple of seq_length, and at its end."""

    total: int
    seq_length: int
    extra: int
    num: int  # samples

    @property
    def last(self) -> int:
        """The last cut, which is no multiple of seq_length behind a short last sample."""
        return min(self.num * self.seq_length, self.total - self.extra)


def _compiled(num_entries: int) -> bool:
    return compiled.WORTH_COMPILING <= num_entries < _MAX_INT32 and compiled.available()


def _shuffle_apart(
    values: NDArray[Any], first: int, shuffle: Callable[[NDArray[Any]], None]
) -> None:
    """Shuffle the entries before `first` and those from it on, each among themselves."""
    shuffle(values[:first])
    shuffle(values[first:])


def _stream(
    sizes: NDArray[np.integer[Any]],
    documents: NDArray[np.int32],
    plan: _Plan,
    cuts: _Cuts,
    seed: int,
) -> GPTIndex:
    """Build the index with numpy alone, from the lengths of `documents` [D].

    What is shuffled are 64-bit entries, which numpy shuffles fastest: the number of a document
    beside its length, so that lengths come in order and are not fetched from all over.
    """
    random = np.random.RandomState(seed)
    entries = np.empty((plan.num_epochs * len(documents), 2), np.int32)
    by_epoch = entries.reshape(plan.num_epochs, len(documents), 2)
    by_epoch[..., 0] = documents
    by_epoch[..., 1] = sizes
    first = len(entries) - len(documents) if plan.separate_last else len(entries)
    _shuffle_apart(entries.view(np.int64).reshape(-1), first, random.shuffle)
    starts = _sample_starts(entries[:, 1], cuts)
    documents_in_order = entries[:, 0].copy()
    del entries, by_epoch
    order = np.arange(cuts.num, dtype=np.int64)
    _shuffle_apart(order, plan.num_before_last if plan.separate_last else cuts.num, random.shuffle)
    return GPTIndex(
        documents=documents_in_order,
        samples=starts,
        shuffle=order.astype(_shuffle_dtype(cuts.num), copy=False),
    )


def _sample_starts(lengths: NDArray[np.int32], cuts: _Cuts) -> NDArray[np.integer[Any]]:
    """Return where each sample starts, [N + 1, 2], from the lengths in order [E * D]."""
    starts = np.empty((cuts.num + 1, 2), np.int32 if len(lengths) <= _MAX_INT32 else np.int64)
    starts[0] = 0
    extra, seq_length, last = cuts.extra, cuts.seq_length, cuts.last
    row, before = 1, 0
    for first in range(0, len(lengths), _BLOCK):
        sizes = lengths[first : first + _BLOCK]
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += before
        before = int(ends[-1])
        # With the extra token a boundary names the token that two samples share; without it, it
        # lies behind the last token of the sample before, in that token's document.
        end = before + 1 - extra
        stop = cuts.num + 1 if last < end else -(-end // seq_length)
        if stop <= row:
            continue
        here = np.minimum(np.arange(row, stop, dtype=np.int64) * seq_length, last)
        position = np.searchsorted(ends, here, side="right" if extra else "left")
        starts[row:stop, 0] = position + first
        starts[row:stop, 1] = here - (ends[position] - sizes[position])
        row = stop
    return starts


def _compiled_stream(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], plan: _Plan, cuts: _Cuts, seed: int
) -> GPTIndex:
    """Build the same index with compiled loops."""
    shuffler = compiled.Shuffler(seed)
    order = np.tile(documents, plan.num_epochs)
    first = len(order) - len(documents) if plan.separate_last else len(order)
    _shuffle_apart(order, first, shuffler.shuffle)
    starts = compiled.sample_starts(lengths, order, cuts.seq_length, cuts.extra, cuts.num)
    if cuts.num * cuts.seq_length > cuts.last:
        last = len(order) - 1
        while not lengths[order[last]]:
            last -= 1
        starts[cuts.num] = last, lengths[order[last]] - cuts.extra
    shuffle: NDArray[np.integer[Any]] = np.arange(cuts.num, dtype=_shuffle_dtype(cuts.num))
    before = plan.num_before_last if plan.separate_last else cuts.num
    _shuffle_apart(shuffle, before, shuffler.shuffle)
    return GPTIndex(documents=order, samples=starts, shuffle=shuffle)


def _shuffle_dtype(num: int) -> type[np.uint32] | type[np.int64]:
    return np.uint32 if num < np.iinfo(np.uint32).max - 1 else np.int64


def as_numbers(values: range | ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Return `values` as an array; a range without going through its items."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, values.step, dtype=dtype)
    return np.asarray(values, dtype)


def num_epoch_samples(
    num_tokens: int, seq_length: int, *, extra_token: bool = True, drop_last: bool = True
) -> int:
    """Return how many samples documents of `num_tokens` give in one epoch."""
    rest = max(num_tokens - int(extra_token), 0)
    return rest // seq_length if drop_last else -(-rest // seq_length)


def build_gpt_index(
    lengths: NDArray[np.integer[Any]],
    documents: range | NDArray[np.integer[Any]],
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
    if isinstance(documents, range):
        sizes = lengths[documents.start : documents.stop : documents.step]
    else:
        sizes = lengths[documents]
    epoch_tokens = int(sizes.sum(dtype=np.int64))
    extra = int(extra_token)
    least = seq_length + extra if num_samples is None and drop_last else 1 + extra
    if epoch_tokens < least:
        raise ValueError(
            f"{len(documents)} documents with {epoch_tokens} tokens hold no sample of seq_length "
            f"{seq_length}, which takes {least}"
        )
    plan = _plan(epoch_tokens, seq_length, num_samples, extra)
    total = plan.num_epochs * epoch_tokens
    rest = total - extra
    num = rest // seq_length if drop_last else -(-rest // seq_length)
    cuts = _Cuts(total=total, seq_length=seq_length, extra=extra, num=num)
    chosen = as_numbers(documents, np.int32)
    if _compiled(plan.num_epochs * len(chosen)):
        return _compiled_stream(np.asarray(lengths, np.int32), chosen, plan, cuts, seed)
    return _stream(sizes, chosen, plan, cuts, seed)

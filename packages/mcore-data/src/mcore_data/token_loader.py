"""Steps of about equally many tokens, from samples of different lengths, balanced over ranks.

T: tokens of a micro-batch. n: its samples. R: data-parallel ranks.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.documents import VariableSource
from mcore_data.datasets.sample import Sample
from mcore_data.loader import MicroBatch, StepLoader
from mcore_data.sampler import PADDING, BatchSampler

Work = Callable[[NDArray[np.int64]], NDArray[Any]]
"""From the lengths of samples to what each costs, in any unit."""


@dataclass(frozen=True, eq=False)
class TokenBatchSampler:
    """An endless stream of samples, cut into steps by their tokens.

    The order is that of `BatchSampler`. A step takes samples as long as they have together at most
    `tokens` positions, and at least one: which samples it holds depends neither on the ranks nor
    on the micro-batches.

    Args:
        lengths: positions of every sample, int64 [*].
        tokens: most positions of a step, over all ranks.
        seed: seed of the shuffle.
        shuffle: show every epoch in another order.

    """

    lengths: NDArray[np.int64]
    tokens: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens of a step is {self.tokens}, the least is 1")
        if not len(self.lengths) or self.lengths.min() < 1:
            raise ValueError(f"{len(self.lengths)} samples: there must be some, none of them empty")

    def batch(self, consumed: int) -> NDArray[np.int64]:
        """Return the ids of the samples of the step after `consumed` samples, int64 [*]."""
        order = BatchSampler(len(self.lengths), 1, self.seed, self.shuffle)
        ids = np.empty(0, np.int64)
        count = 2 + int(self.tokens / self.lengths.mean())
        while True:
            ids = np.concatenate([ids, order.take(consumed + len(ids), count)])
            sums = np.cumsum(self.lengths[ids])
            if sums[-1] > self.tokens:
                return ids[: max(1, int(np.searchsorted(sums, self.tokens, side="right")))]
            count = len(ids)

    def after(self, consumed: int) -> int:
        """Return the samples consumed after that step."""
        return consumed + len(self.batch(consumed))

    def state(self) -> dict[str, Any]:
        """Return what must be equal for two runs to consume the same stream, JSON-able."""
        return {
            "num_samples": len(self.lengths),
            "num_tokens": int(self.lengths.sum()),
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


def balance(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    num_ranks: int,
    max_tokens: int,
    work: Work | None = None,
) -> list[list[list[int]]]:
    """Return the samples of every micro-batch of every rank, [R][micro-batches][*].

    Every rank has the same number of micro-batches, the least that is found, each of at most
    `max_tokens` positions. The longest samples are placed first, each where least work is; then
    micro-batches of like work stand side by side, and ranks with more of it one time have less
    the next. A micro-batch may be empty where there are too few samples.

    Args:
        lengths: positions of the samples.
        num_ranks: data-parallel ranks R.
        max_tokens: most positions of a micro-batch.
        work: cost of samples by their lengths (default: the lengths; attention costs more than
            in proportion).

    Raises:
        ValueError: a sample has more positions than a micro-batch takes.

    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and sizes.max() > max_tokens:
        place = int(sizes.argmax())
        raise ValueError(
            f"sample {place} has {sizes[place]} positions, a micro-batch takes {max_tokens}"
        )
    costs = (sizes if work is None else work(sizes)).astype(np.float64)
    order = np.lexsort((np.arange(len(sizes)), -sizes, -costs)).tolist()
    rounds = max(1, -(-int(sizes.sum()) // (num_ranks * max_tokens)))
    while (bins := _fill(order, sizes, costs, rounds * num_ranks, max_tokens)) is None:
        rounds += 1
    bins.sort(key=lambda items: -sum(costs[i] for i in items))
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(bins), num_ranks):
        group = bins[start : start + num_ranks]
        group = group if start // num_ranks % 2 == 0 else group[::-1]
        for share, items in zip(shares, group, strict=True):
            share.append(sorted(items))
    return shares


def _fill(
    order: list[int],
    sizes: NDArray[np.int64],
    costs: NDArray[np.float64],
    num_bins: int,
    capacity: int,
) -> list[list[int]] | None:
    """Place every item where least work is and room for it; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, place, capacity) for place in range(num_bins)]
    for item in order:
        full = []
        while heap and heap[0][2] < sizes[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, place, room = heapq.heappop(heap)
        bins[place].append(item)
        heapq.heappush(heap, (cost + float(costs[item]), place, room - int(sizes[item])))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def collate_flat(samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
    """Join samples of any lengths into one micro-batch without padding.

    Returns tokens, labels, positions int64 [T], loss_mask float32 [T], sample_ids int64 [n], and
    cu_seqlens int32 [N + 1]: the bounds of the segments of all samples.
    """
    begins = np.cumsum([0] + [len(sample.tokens) for sample in samples])
    bounds = [s.cu_seqlens[:-1] + begin for s, begin in zip(samples, begins, strict=False)]
    names = ("tokens", "labels", "loss_mask", "positions")
    return {
        **{name: np.concatenate([getattr(sample, name) for sample in samples]) for name in names},
        "cu_seqlens": np.concatenate([*bounds, begins[-1:]]).astype(np.int32),
        "sample_ids": np.array(sample_ids, np.int64),
    }


class TokenBatchLoader(StepLoader):
    """Endless iterator over training steps of samples of different lengths, without padding.

    Each item is this rank's list of micro-batches (see `collate_flat`), the same number on every
    rank. Where there are too few samples a micro-batch holds one of them without loss, id -1.

    Args:
        dataset: the samples.
        sampler: which of them, in which order.
        dp_rank: this rank's place among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        max_tokens: most positions of a micro-batch.
        work: cost of samples by their lengths, see `balance`.
        consumed: samples consumed before, over all ranks (the state to resume from).
        prefetch: steps to read ahead; 0 reads in the calling thread.

    Raises:
        ValueError: a sample has more positions than a micro-batch takes, or the sampler counts
            others than the dataset has.
        RuntimeError: from `next`, when a sample cannot be read; it names the samples.

    """

    def __init__(
        self,
        dataset: VariableSource,
        sampler: TokenBatchSampler,
        *,
        dp_rank: int,
        dp_size: int,
        max_tokens: int,
        work: Work | None = None,
        consumed: int = 0,
        prefetch: int = 2,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} does not lie in 0 to {dp_size - 1}")
        if not np.array_equal(sampler.lengths, dataset.lengths):
            raise ValueError(
                f"the sampler counts {len(sampler.lengths)} samples of {sampler.lengths.sum()} "
                f"positions, the dataset has {len(dataset)} of {dataset.lengths.sum()}"
            )
        longest = int(dataset.lengths.argmax())
        if dataset.lengths[longest] > max_tokens:
            raise ValueError(
                f"sample {longest} has {dataset.lengths[longest]} positions, a micro-batch takes "
                f"{max_tokens}"
            )
        super().__init__(sampler, consumed, prefetch)
        self.dataset = dataset
        self.sampler = sampler
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.max_tokens = max_tokens
        self.work = work

    def sample_ids(self, consumed: int) -> list[list[int]]:
        """Return the ids of this rank's micro-batches of the step after `consumed` samples."""
        ids = self.sampler.batch(consumed)
        shares = balance(
            self.dataset.lengths[ids],
            num_ranks=self.dp_size,
            max_tokens=self.max_tokens,
            work=self.work,
        )
        return [[int(ids[i]) for i in items] for items in shares[self.dp_rank]]

    def _read_step(self, consumed: int) -> list[MicroBatch]:
        return [self._read(ids) for ids in self.sample_ids(consumed)]

    def _read(self, ids: list[int]) -> MicroBatch:
        wanted = ids or [int(self.dataset.lengths.argmin())]
        try:
            batch = collate_flat([self.dataset[i] for i in wanted], ids or [PADDING])
        except Exception as error:
            named = ", ".join(map(str, wanted[:8])) + (", ..." if len(wanted) > 8 else "")
            raise RuntimeError(f"loading samples {named} failed: {error}") from error
        if not ids:
            batch["loss_mask"][:] = 0
        return batch

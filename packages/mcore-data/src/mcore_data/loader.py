"""Micro-batches for one data-parallel rank, as numpy arrays.

B: samples of a micro-batch. S: tokens of a sample. N: segments in a micro-batch.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.sample import Sample, SampleSource
from mcore_data.sampler import PADDING

MicroBatch = dict[str, NDArray[Any]]
T = TypeVar("T")


def collate(samples: Sequence[Sample], sample_ids: Sequence[int]) -> MicroBatch:
    """Stack samples into a micro-batch.

    Returns tokens, labels, positions int64 [B, S], loss_mask float32 [B, S], sample_ids
    int64 [B], and cu_seqlens int32 [N + 1]: the segment bounds in the flattened [B * S] tokens.
    What samples hold beside is stacked too, [B, ...] (see `Sample.extra`).
    """
    size = len(samples[0].tokens)
    starts = [sample.cu_seqlens[:-1] + row * size for row, sample in enumerate(samples)]
    return {
        "tokens": np.stack([sample.tokens for sample in samples]),
        "labels": np.stack([sample.labels for sample in samples]),
        "loss_mask": np.stack([sample.loss_mask for sample in samples]),
        "positions": np.stack([sample.positions for sample in samples]),
        "cu_seqlens": np.concatenate([*starts, [len(samples) * size]]).astype(np.int32),
        "sample_ids": np.array(sample_ids, np.int64),
        **{name: np.stack([s.extra()[name] for s in samples]) for name in samples[0].extra()},
    }


def _load(dataset: SampleSource, ids: NDArray[np.int64]) -> MicroBatch:
    """Read one micro-batch; rows of id PADDING are some sample whose loss mask is 0."""
    try:
        samples = [dataset[max(int(i), 0)] for i in ids]
        batch = collate(samples, ids.tolist())
    except Exception as error:
        named = ", ".join(str(i) for i in ids[:8].tolist()) + (", ..." if len(ids) > 8 else "")
        raise RuntimeError(f"loading samples {named} failed: {error}") from error
    batch["loss_mask"][ids == PADDING] = 0
    return batch


def _prefetched(jobs: Iterator[Callable[[], T]], depth: int) -> Generator[T]:
    """Yield the results of `jobs` in order; a thread works up to `depth` jobs ahead.

    An exception in a job is raised here, in its turn.
    """
    if depth < 1:
        for job in jobs:
            yield job()
        return
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="mcore-data-prefetch")
    try:
        for job in jobs:
            pending.append(pool.submit(job))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_ranks(dp_rank: int, dp_size: int, micro_batch_size: int) -> None:
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank} does not lie in 0 to {dp_size - 1}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}, the least is 1")


class Stream(Protocol):
    """An order of samples: a function of the samples consumed, without a state of its own."""

    def after(self, consumed: int) -> int:
        """Return the samples consumed after the step that follows `consumed`."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what two runs of the same stream have in common, JSON-able."""
        ...


class BatchStream(Stream, Protocol):
    """An order of samples of one size, cut into batches: `BatchSampler` is one."""

    @property
    def num_samples(self) -> int:
        """Number of samples that there are."""
        ...

    def sizes(self) -> Sequence[int]:
        """Return the sizes that a batch may have."""
        ...

    def size(self, consumed: int) -> int:
        """Return the size of the batch after `consumed` samples."""
        ...

    def batch(self, consumed: int) -> NDArray[np.int64]:
        """Return the ids of that batch, int64 [size]; padding is -1."""
        ...


class StepLoader:
    """Endless iterator over training steps that can be resumed at any of them.

    A thread reads ahead; what it has read but nobody has taken does not count as consumed. The
    kinds of loaders say what a step is, in `_read_step`.
    """

    def __init__(self, sampler: Stream, consumed: int, prefetch: int) -> None:
        self.consumed = consumed
        self._stream = sampler
        self._prefetch = prefetch
        self._steps: Generator[list[MicroBatch]] | None = None

    def _read_step(self, consumed: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step after `consumed` samples."""
        raise NotImplementedError

    def _jobs(self, consumed: int) -> Iterator[Callable[[], list[MicroBatch]]]:
        while True:
            yield partial(self._read_step, consumed)
            consumed = self._stream.after(consumed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[MicroBatch]:
        if self._steps is None:
            self._steps = _prefetched(self._jobs(self.consumed), self._prefetch)
        try:
            step = next(self._steps)
        except BaseException:
            self.close()
            raise
        self.consumed = self._stream.after(self.consumed)
        return step

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint after `consumed` samples must hold, JSON-able."""
        return {"consumed_samples": consumed, "sampler": self._stream.state()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, JSON-able: it does not depend on the ranks."""
        return self.state_at(self.consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; ValueError when the stream is another one."""
        theirs, ours = state["sampler"], self._stream.state()
        if theirs != ours:
            raise ValueError(f"the state is of a stream with {theirs}, this loader has {ours}")
        self.close()
        self.consumed = int(state["consumed_samples"])

    def close(self) -> None:
        """Stop reading ahead; the next step starts again from `consumed`."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class MicroBatchLoader(StepLoader):
    """Endless iterator over training steps: each item is this rank's list of micro-batches.

    Micro-batch k of a step holds, over all ranks in order, samples k * B * dp_size to
    (k + 1) * B * dp_size - 1 of the global batch: which samples make up a step, and their
    order, depend on the sampler alone. A thread reads ahead; what it has read but nobody has
    taken does not count as consumed.

    Args:
        dataset: the samples.
        sampler: which of them, in which order.
        dp_rank: this rank's place among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        micro_batch_size: samples B of a micro-batch.
        consumed: samples consumed before, over all ranks (the state to resume from).
        prefetch: steps to read ahead; 0 reads in the calling thread.

    Raises:
        ValueError: a size of the global batch is no multiple of B * dp_size, or the sampler counts
            other samples than the dataset has.
        RuntimeError: from `next`, when a sample cannot be read; it names the samples.

    """

    def __init__(
        self,
        dataset: SampleSource,
        sampler: BatchStream,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        consumed: int = 0,
        prefetch: int = 2,
    ) -> None:
        _check_ranks(dp_rank, dp_size, micro_batch_size)
        unit = micro_batch_size * dp_size
        for size in sampler.sizes():
            if size % unit:
                below, above = size // unit * unit, (size // unit + 1) * unit
                nearest = f"{below} or {above}" if below else f"{above}"
                raise ValueError(
                    f"global batch of {size} samples is no multiple of {unit} "
                    f"(micro-batch {micro_batch_size} x {dp_size} ranks); nearest: {nearest}"
                )
        if sampler.num_samples != len(dataset):
            raise ValueError(
                f"the sampler counts {sampler.num_samples} samples, the dataset has {len(dataset)}"
            )
        super().__init__(sampler, consumed, prefetch)
        self.dataset = dataset
        self.sampler = sampler
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.micro_batch_size = micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the next step on each rank."""
        return self.sampler.size(self.consumed) // (self.micro_batch_size * self.dp_size)

    def sample_ids(self, consumed: int) -> NDArray[np.int64]:
        """Return this rank's ids of the step after `consumed`, int64 [micro-batches, B]."""
        shape = (-1, self.dp_size, self.micro_batch_size)
        return self.sampler.batch(consumed).reshape(shape)[:, self.dp_rank]

    def _read_step(self, consumed: int) -> list[MicroBatch]:
        return [_load(self.dataset, ids) for ids in self.sample_ids(consumed)]


class ValidationLoader:
    """Every sample exactly once, over all ranks, in equal numbers of equal micro-batches.

    Each iteration over it is one pass. The last micro-batch may have fewer rows, the same
    number on every rank; where samples run out, rows have loss mask 0 and sample id -1 (at most
    dp_size - 1 such rows in all). The token-weighted mean over all ranks is thus the exact mean.

    Args:
        dataset: the samples.
        dp_rank: this rank's place among the data-parallel ranks.
        dp_size: number of data-parallel ranks.
        micro_batch_size: most samples of a micro-batch.
        num_samples: use the first so many (default: all).
        prefetch: micro-batches to read ahead.

    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        num_samples: int | None = None,
        prefetch: int = 2,
    ) -> None:
        _check_ranks(dp_rank, dp_size, micro_batch_size)
        count = len(dataset) if num_samples is None else num_samples
        if not 1 <= count <= len(dataset):
            raise ValueError(
                f"{count} validation samples asked for, the dataset has {len(dataset)}"
            )
        self.dataset = dataset
        self.num_samples = count
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.micro_batch_size = micro_batch_size
        self._prefetch = prefetch

    def __len__(self) -> int:
        """Return the number of micro-batches, the same on every rank."""
        return math.ceil(self.num_samples / (self.micro_batch_size * self.dp_size))

    def sample_ids(self) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's sample ids of each micro-batch, int64 [B]; -1 for padding rows."""
        unit = self.micro_batch_size * self.dp_size
        for start in range(0, self.num_samples, unit):
            rows = -(-min(unit, self.num_samples - start) // self.dp_size)
            ids = start + self.dp_rank * rows + np.arange(rows, dtype=np.int64)
            yield np.where(ids < self.num_samples, ids, PADDING)

    def __iter__(self) -> Iterator[MicroBatch]:
        jobs = (partial(_load, self.dataset, ids) for ids in self.sample_ids())
        return _prefetched(jobs, self._prefetch)

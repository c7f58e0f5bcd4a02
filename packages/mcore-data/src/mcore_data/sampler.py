"""Which samples a training step sees: a pure function of the seed and the samples consumed."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

PADDING: Final = -1
"""Sample id of a row that stands for no sample."""

_ROUNDS: Final = 8


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words (the finaliser of splitmix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled_order(
    positions: ArrayLike, *, num_samples: int, seed: int, epoch: ArrayLike
) -> NDArray[np.int64]:
    """Return the sample shown at each of `positions` (0 to num_samples - 1) of an epoch, int64.

    `epoch` is one number, or one for each position.

    For a fixed seed and epoch this is a permutation of 0 to num_samples - 1. It is computed
    entry by entry (a keyed Feistel network over the next power of four, walked until it lands
    below num_samples; Black and Rogaway 2002), so it needs no memory, starts anywhere at once,
    and depends on no library's random stream.
    """
    x = np.array(positions, np.uint64)
    if x.size and int(x.max()) >= num_samples:
        raise ValueError(f"position {x.max()} lies outside an epoch of {num_samples} samples")
    bits = np.uint64(max(1, -(-(num_samples - 1).bit_length() // 2)))
    low = (np.uint64(1) << bits) - np.uint64(1)
    epochs = np.atleast_1d(np.asarray(epoch, np.uint64))
    base = _mix(_mix(np.array([seed % 2**64], np.uint64)) + epochs)
    rounds: NDArray[np.uint64] = np.arange(_ROUNDS, dtype=np.uint64)
    keys = _mix(base + rounds[:, None])
    flat = x.reshape(-1)
    todo = np.arange(flat.size)
    while todo.size:
        left, right = flat[todo] >> bits, flat[todo] & low
        for key in keys if len(epochs) == 1 else keys[:, todo]:
            left, right = right, left ^ (_mix(right ^ key) & low)
        flat[todo] = (left << bits) | right
        todo = todo[flat[todo] >= num_samples]
    return x.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A batch that grows with the samples consumed, in equal steps (Megatron-LM's ramp-up).

    Attributes:
        start: samples of the first batches.
        increment: samples by which the batch grows.
        samples: samples consumed until the batch has its final size.

    """

    start: int
    increment: int
    samples: int

    def __post_init__(self) -> None:
        for name in ("start", "increment", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"ramp {name} is {getattr(self, name)}, the least is 1")

    def sizes(self, final: int) -> range:
        """Return the sizes of the batch, from `start` to `final`; ValueError when no step hits it.

        The message names the nearest final size that one does.
        """
        rest = final - self.start
        if rest < 0 or rest % self.increment:
            below = self.start + max(rest, 0) // self.increment * self.increment
            raise ValueError(
                f"a batch of {final} samples is not reached from {self.start} in steps of "
                f"{self.increment}; nearest: {below}"
            )
        return range(self.start, final + 1, self.increment)

    def size(self, consumed: int, final: int) -> int:
        """Return the size of the batch after `consumed` samples."""
        if consumed > self.samples:
            return final
        steps = len(self.sizes(final)) - 1
        if not steps:
            return final
        return min(self.start + consumed * steps // self.samples * self.increment, final)


@dataclass(frozen=True, kw_only=True)
class BatchSteps:
    """A batch whose size changes where so many samples have been consumed.

    Attributes:
        starts: samples consumed at the beginning of every step, rising from 0.
        batches: samples of a batch from there on; the last is the final size.

    Raises:
        ValueError: the starts do not rise from 0, or a size is below 1.

    """

    starts: tuple[int, ...]
    batches: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.batches) or not self.starts or self.starts[0] != 0:
            raise ValueError(
                f"batches of {list(self.batches)} samples from {list(self.starts)} consumed ones "
                "on: each takes a start, the first of them 0"
            )
        if list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"the starts {list(self.starts)} of batch sizes do not rise")
        if min(self.batches) < 1:
            raise ValueError(f"a batch of {min(self.batches)} samples: the least is 1")

    def sizes(self, final: int) -> Sequence[int]:
        """Return the sizes of the batch; ValueError when the last is not `final`."""
        if self.batches[-1] != final:
            raise ValueError(
                f"the batch ends with {self.batches[-1]} samples, global_batch_size is {final}: "
                f"use {self.batches[-1]}"
            )
        return sorted(set(self.batches))

    def size(self, consumed: int, final: int) -> int:
        """Return the size of the batch after `consumed` samples."""
        return self.batches[bisect.bisect_right(self.starts, consumed) - 1]


@dataclass(frozen=True)
class BatchSampler:
    """The order in which samples are consumed, over as many epochs as are asked for.

    Epoch after epoch forms one endless stream; a batch is the next stretch of it. There is no
    state: resuming, with any number of ranks, is calling `batch` with the samples consumed so far.

    Args:
        num_samples: samples in an epoch.
        global_batch_size: samples in a batch, over all ranks.
        seed: seed of the shuffle.
        shuffle: show every epoch in another order; otherwise in the order of the dataset
            (right for `GPTDataset`, whose samples are shuffled already).
        last: what becomes of the end of an epoch that does not fill a batch. `join`: the batch
            goes on into the next epoch, and no sample is left out. `drop`: it is left out, and
            counts as consumed. `pad`: it is a batch with rows of id -1, which bear no loss.
        ramp: how the batch comes to `global_batch_size`, evenly (`BatchRamp`) or in steps
            (`BatchSteps`); None: it has that size from the start.

    """

    num_samples: int
    global_batch_size: int
    seed: int = 0
    shuffle: bool = False
    last: Literal["join", "drop", "pad"] = "join"
    ramp: BatchRamp | BatchSteps | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is 1")
        if self.last not in ("join", "drop", "pad"):
            raise ValueError(f"last is {self.last!r}, it can be join, drop or pad")
        if self.last == "drop" and self.num_samples < self.global_batch_size:
            raise ValueError(
                f"an epoch of {self.num_samples} samples holds no batch of "
                f"{self.global_batch_size}: nothing is left with last='drop'"
            )
        if self.ramp is not None:
            self.ramp.sizes(self.global_batch_size)

    def take(self, consumed: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the `count` samples after the first `consumed`, int64 [count]."""
        if consumed < 0 or count < 0:
            raise ValueError(f"consumed {consumed} and count {count} must be at least 0")
        places = np.arange(consumed, consumed + count, dtype=np.int64)
        epochs, positions = np.divmod(places, self.num_samples)
        if self.shuffle:
            whole = bool(count) and epochs[0] == epochs[-1]
            positions = shuffled_order(
                positions,
                num_samples=self.num_samples,
                seed=self.seed,
                epoch=epochs[0] if whole else epochs,
            )
        return positions

    def sizes(self) -> Sequence[int]:
        """Return the sizes that a batch may have."""
        final = self.global_batch_size
        return range(final, final + 1) if self.ramp is None else self.ramp.sizes(final)

    def size(self, consumed: int) -> int:
        """Return the size of the batch after `consumed` samples."""
        if self.ramp is None:
            return self.global_batch_size
        return self.ramp.size(consumed, self.global_batch_size)

    def _stretch(self, consumed: int) -> tuple[int, int]:
        """Return where the batch after `consumed` samples begins, and how many samples it has."""
        size = self.size(consumed)
        left = self.num_samples - consumed % self.num_samples
        if self.last == "join" or left >= size:
            return consumed, size
        return (consumed, left) if self.last == "pad" else (consumed + left, size)

    def batch(self, consumed: int) -> NDArray[np.int64]:
        """Return the ids of the batch after `consumed` samples, int64 [size]; padding is -1."""
        begin, count = self._stretch(consumed)
        ids = self.take(begin, count)
        return np.pad(ids, (0, self.size(consumed) - count), constant_values=PADDING)

    def after(self, consumed: int) -> int:
        """Return the samples consumed after that batch: left-out ones count, padding does not."""
        begin, count = self._stretch(consumed)
        return begin + count

    def state(self) -> dict[str, Any]:
        """Return what must be equal for two runs to consume the same stream, JSON-able."""
        state = {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}
        return state if self.last == "join" else {**state, "last": self.last}

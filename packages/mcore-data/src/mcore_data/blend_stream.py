"""An endless blend: sources in changing proportions, resumed by what was drawn from each.

Every source is a stream of its own, epoch after epoch in another order; the weights say which
stream gives the next sample. Neither the length of a run nor its ranks matter, and where weights
change every source goes on where it stands: nothing is repeated, nothing left out.

K: sources.
"""

import bisect
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets.blend_order import check_weights, continued_blend_index
from mcore_data.datasets.sample import Sample, SampleSource
from mcore_data.loader import MicroBatchLoader
from mcore_data.sampler import BatchRamp, BatchSampler, BatchSteps

_BLOCK: Final = 1 << 15  # samples whose sources are drawn at a time
_KEPT: Final = 4  # blocks in memory

Weights = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class WeightSchedule:
    """The weights of a blend by the samples consumed: constant from one start to the next.

    Attributes:
        starts: samples consumed at the beginning of every phase, rising from 0.
        weights: weights [K] of every phase, divided by their sum.

    Raises:
        ValueError: the starts do not rise from 0, or weights are none or not equally many.

    """

    starts: tuple[int, ...]
    weights: tuple[Weights, ...]

    def __post_init__(self) -> None:
        if not self.starts or self.starts[0] != 0 or len(self.starts) != len(self.weights):
            raise ValueError(
                f"{len(self.weights)} phases of weights start at {list(self.starts)}: the first "
                "must start at 0 samples"
            )
        for before, start in zip(self.starts, self.starts[1:], strict=False):
            if start <= before:
                raise ValueError(f"a phase starts at {start} samples, after one at {before}")
        for start, weights in zip(self.starts, self.weights, strict=True):
            if len(weights) != len(self.weights[0]):
                raise ValueError(
                    f"{len(weights)} weights from {start} samples on, {len(self.weights[0])} "
                    "from the first"
                )
        normal = tuple(tuple(check_weights(weights).tolist()) for weights in self.weights)
        object.__setattr__(self, "weights", normal)

    @classmethod
    def constant(cls, weights: Sequence[float]) -> Self:
        """Return the schedule that keeps `weights` (of any sum)."""
        return cls(starts=(0,), weights=(tuple(weights),))

    @classmethod
    def read(cls, path: str | Path, names: Sequence[str]) -> Self:
        """Read a JSON list of phases, `{"samples": START, "weights": {NAME: WEIGHT, ...}}` each.

        `names` are those of the sources; one that a phase does not name has weight 0 there.
        ValueError names the file, the phase and what is wrong.
        """
        where = Path(path)
        try:
            rows = json.loads(where.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: no JSON ({error})") from None
        if not isinstance(rows, list) or not rows:
            raise ValueError(f"{where}: it must hold a list of phases")
        starts, phases = [], []
        for number, row in enumerate(rows):
            place = f"{where}: phase {number}"
            if not isinstance(row, dict) or set(row) != {"samples", "weights"}:
                raise ValueError(f"{place}: an object with samples and weights is expected")
            start, weights = row["samples"], row["weights"]
            if type(start) is not int or not isinstance(weights, dict):
                raise ValueError(f"{place}: samples is a number, weights an object by source")
            if unknown := sorted(set(weights) - set(names)):
                raise ValueError(f"{place}: no source is {unknown[0]!r}, there are {list(names)}")
            if not all(type(weight) in (int, float) for weight in weights.values()):
                raise ValueError(f"{place}: weights {weights} must be numbers")
            starts.append(start)
            phases.append(tuple(float(weights.get(name, 0)) for name in names))
        try:
            return cls(starts=tuple(starts), weights=tuple(phases))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def at(self, consumed: int) -> Weights:
        """Return the weights of the sample after the first `consumed`."""
        return self.weights[bisect.bisect_right(self.starts, consumed) - 1]

    def next_start(self, consumed: int) -> int | None:
        """Return where the first phase after `consumed` starts; None: there is none."""
        place = bisect.bisect_right(self.starts, consumed)
        return self.starts[place] if place < len(self.starts) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mark:
    """Where the stream stands: drawn from each source in all, and since the weights changed."""

    consumed: int
    weights: Weights
    counts: NDArray[np.int64]
    phase_counts: NDArray[np.int64]

    def under(self, weights: Weights) -> "_Mark":
        """Return the same place in the stream, where these weights hold from now on."""
        if weights == self.weights:
            return self
        return _Mark(
            consumed=self.consumed,
            weights=weights,
            counts=self.counts,
            phase_counts=np.zeros_like(self.counts),
        )

    def onwards(self, sources: NDArray[Any]) -> "_Mark":
        """Return the place after samples of these sources, under the same weights."""
        more = np.bincount(sources, minlength=len(self.counts)).astype(np.int64)
        return _Mark(
            consumed=self.consumed + len(sources),
            weights=self.weights,
            counts=self.counts + more,
            phase_counts=self.phase_counts + more,
        )


class BlendSampler:
    """The order in which samples of several sources are consumed; endless, without a state.

    Stands where a `BatchSampler` does. Samples are numbered through the sources, as in
    `JoinedDataset`. Which source is next follows `scheduled_blend_index`; the samples of one source
    follow `BatchSampler` with a seed made of `seed` and the source's name.

    Args:
        lengths: samples of each source, by its name.
        weights: of the sources, constant (of any sum) or by the samples consumed.
        global_batch_size: samples in a batch, over all ranks.
        seed: seed of the shuffles.
        shuffle: show every epoch of a source in another order.
        ramp: how the batch comes to `global_batch_size`.

    Raises:
        ValueError: weights and sources are not equally many, or a source that is drawn is empty.

    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        weights: WeightSchedule | Sequence[float],
        global_batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        ramp: BatchRamp | BatchSteps | None = None,
    ) -> None:
        schedule = weights
        if not isinstance(schedule, WeightSchedule):
            schedule = WeightSchedule.constant(schedule)
        if len(schedule.weights[0]) != len(lengths):
            raise ValueError(f"{len(schedule.weights[0])} weights for {len(lengths)} sources")
        for name, shares in zip(lengths, zip(*schedule.weights, strict=True), strict=True):
            if any(shares) and lengths[name] < 1:
                raise ValueError(f"source {name} has no samples, its weights are {list(shares)}")
        self.lengths = dict(lengths)
        self.schedule = schedule
        self.seed = seed
        self.shuffle = shuffle
        self._batch = BatchSampler(max(self.num_samples, 1), global_batch_size, ramp=ramp)
        self._streams = [
            BatchSampler(max(length, 1), 1, _seed_of(seed, name), shuffle)
            for name, length in self.lengths.items()
        ]
        self._offsets = np.cumsum([0, *self.lengths.values()])[:-1]
        none = np.zeros(len(self.lengths), np.int64)
        self._begin(_Mark(consumed=0, weights=schedule.weights[0], counts=none, phase_counts=none))

    def _begin(self, start: _Mark) -> None:
        # Kept beside its mark: weights under which nothing is drawn are not in `progress`.
        self._start = start
        self._marks = [start.under(self.schedule.at(start.consumed))]
        self._lock = threading.Lock()
        self._block = lru_cache(maxsize=_KEPT)(self._draw_block)

    @property
    def num_samples(self) -> int:
        """Samples of all sources together."""
        return sum(self.lengths.values())

    def sizes(self) -> Sequence[int]:
        """Return the sizes that a batch may have."""
        return self._batch.sizes()

    def size(self, consumed: int) -> int:
        """Return the size of the batch after `consumed` samples."""
        return self._batch.size(consumed)

    def batch(self, consumed: int) -> NDArray[np.int64]:
        """Return the ids of the batch after `consumed` samples, int64 [size]."""
        return self.take(consumed, self.size(consumed))

    def after(self, consumed: int) -> int:
        """Return the samples consumed after that batch."""
        return consumed + self.size(consumed)

    def take(self, consumed: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the `count` samples after the first `consumed`, int64 [count]."""
        ids = np.empty(count, np.int64)
        done = 0
        while done < count:
            number, mark = self._find(consumed + done)
            skipped = consumed + done - mark.consumed
            drawn = self._block(number)
            sources = drawn[skipped : skipped + count - done]
            before = mark.onwards(drawn[:skipped]).counts
            for k in np.unique(sources).tolist():
                mine = sources == k
                stretch = self._streams[k].take(int(before[k]), int(mine.sum()))
                ids[done : done + len(sources)][mine] = stretch + self._offsets[k]
            done += len(sources)
        return ids

    def counts(self, consumed: int) -> dict[str, int]:
        """Return how many of the first `consumed` samples come from each source."""
        return dict(zip(self.lengths, self._place(consumed).counts.tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """Return what two runs of the same stream have in common but for weights, JSON-able."""
        return {"blend": dict(self.lengths), "seed": self.seed, "shuffle": self.shuffle}

    def progress(self, consumed: int) -> dict[str, Any]:
        """Return how far each source is after `consumed` samples, JSON-able; see `resumed`."""
        place = self._place(consumed)
        rows = zip(place.weights, place.counts.tolist(), place.phase_counts.tolist(), strict=True)
        return {
            name: {"weight": weight, "consumed": count, "since_change": since}
            for name, (weight, count, since) in zip(self.lengths, rows, strict=True)
        }

    def resumed(
        self, state: Mapping[str, Any], progress: Mapping[str, Any], consumed: int
    ) -> "BlendSampler":
        """Return the stream that goes on where `state()` and `progress(consumed)` were taken.

        From there on the weights are those of this sampler: where they differ from those of the
        sample before, they hold for what follows; weights that are changed back before a sample is
        drawn leave no trace. Sources may have been added; one that is gone must not have been
        drawn. A file that has become `folder/name`, since another of its name was added, or the
        other way round, goes on under the name that it had: on that its order depends.

        Raises:
            ValueError: it is the state of another kind of stream, of another seed, or of a source
                with another number of samples, so that samples would be repeated or left out.
        """
        ours = self.state()
        if "blend" not in state or any(state[n] != ours[n] for n in ("seed", "shuffle")):
            raise ValueError(f"the state is of a stream with {dict(state)}, this one has {ours}")
        known = _former_names(self.lengths, state["blend"])
        lengths = {known.get(name, name): length for name, length in self.lengths.items()}
        for name, row in progress.items():
            length = state["blend"][name]
            if row["consumed"] and lengths.get(name) != length:
                now = lengths.get(name)
                found = "is gone: keep it, with weight 0" if now is None else f"has {now} now"
                raise ValueError(
                    f"{row['consumed']} samples were drawn from {name}, which had {length}: it "
                    f"{found}"
                )
        rows = [progress.get(name, {}) for name in lengths]
        start = _Mark(
            consumed=consumed,
            # Without a source that had a weight they sum to less than 1: a new phase begins.
            weights=tuple(float(row.get("weight", 0)) for row in rows),
            counts=np.array([row.get("consumed", 0) for row in rows], np.int64),
            phase_counts=np.array([row.get("since_change", 0) for row in rows], np.int64),
        )
        other = BlendSampler(
            lengths,
            self.schedule,
            self._batch.global_batch_size,
            self.seed,
            shuffle=self.shuffle,
            ramp=self._batch.ramp,
        )
        other._begin(start)
        return other

    def _find(self, consumed: int) -> tuple[int, _Mark]:
        """Return the block that holds the sample after the first `consumed`, and its beginning."""
        first = self._start.consumed
        if consumed < first:
            raise ValueError(f"the stream was resumed at {first} samples, {consumed} lie before")
        with self._lock:
            while self._marks[-1].consumed <= consumed:
                end = self._marks[-1].onwards(self._block(len(self._marks) - 1))
                self._marks.append(end.under(self.schedule.at(end.consumed)))
            number = bisect.bisect_right(self._marks, consumed, key=lambda m: m.consumed) - 1
            return number, self._marks[number]

    def _place(self, consumed: int) -> _Mark:
        """Return where the stream stands after `consumed` samples, before weights change there."""
        if consumed == self._start.consumed:
            return self._start
        number, mark = self._find(consumed - 1)
        return mark.onwards(self._block(number)[: consumed - mark.consumed])

    def _draw_block(self, number: int) -> NDArray[Any]:
        """Return the source of every sample of a block, [<= _BLOCK]: it ends with its phase."""
        mark = self._marks[number]
        stop = self.schedule.next_start(mark.consumed)
        count = _BLOCK if stop is None else min(_BLOCK, stop - mark.consumed)
        weights = np.array(mark.weights, np.float64)
        return continued_blend_index(weights, mark.phase_counts, count).sources


def _former_names(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, str]:
    """Return what sources of ours were called that went by a longer or a shorter path before.

    Raises:
        ValueError: several of ours may be the same one of theirs, or the other way round.
    """
    found: dict[str, str] = {}
    for name in ours.keys() - theirs.keys():
        for old in sorted(theirs.keys() - ours.keys()):
            same_end = name.endswith(f"/{old}") or old.endswith(f"/{name}")
            if not same_end or ours[name] != theirs[old]:
                continue
            if name in found or old in found.values():
                raise ValueError(
                    f"{old} of the state may be any of several files of {ours[name]} samples that "
                    f"are called so: give them names that differ"
                )
            found[name] = old
    return found


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class JoinedDataset:
    """Several datasets, one behind the other, as one."""

    def __init__(self, datasets: Sequence[SampleSource]) -> None:
        self.datasets = tuple(datasets)
        self._ends: list[int] = np.cumsum([len(dataset) for dataset in datasets]).tolist()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect.bisect_right(self._ends, index)
        dataset = self.datasets[number]
        return dataset[index - self._ends[number] + len(dataset)]


class BlendLoader(MicroBatchLoader):
    """A `MicroBatchLoader` over a `JoinedDataset` whose state counts what every source has given.

    It can go on with other weights: see `BlendSampler.resumed`.
    """

    sampler: BlendSampler

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint after `consumed` samples must hold, JSON-able."""
        return {**super().state_at(consumed), "sources": self.sampler.progress(consumed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; ValueError as for `BlendSampler.resumed`."""
        consumed = int(state["consumed_samples"])
        sampler = self.sampler.resumed(state["sampler"], state.get("sources", {}), consumed)
        self.close()
        self.sampler = self._stream = sampler
        self.consumed = consumed

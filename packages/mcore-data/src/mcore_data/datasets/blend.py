"""Several sources read as one: which files in which proportion, and the samples of the mixture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mcore_data.datasets.blend_order import (
    BlendIndex,
    blend_index,
    check_weights,
    counted_blend_index,
)
from mcore_data.datasets.cache import cached_arrays, content_key
from mcore_data.datasets.sample import Sample, SampleSource

_INDEX_VERSION: Final = 1
# Each source is made a little longer than its share: Megatron-LM's rule, on which the number of
# its epochs, and so its order, depends.
_SURPLUS: Final = 0.005


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Files, and how much of each.

    Attributes:
        prefixes: the `.bin/.idx` pairs, without ending.
        weights: share of each in the samples, of any sum; None: see `counts`.
        counts: samples to take from each; None as well as `weights`: every sample once.

    Raises:
        ValueError: no file, both or wrong numbers of weights and counts, or one of them is bad.

    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ValueError("a blend needs at least one file")
        if self.weights is not None and self.counts is not None:
            raise ValueError("a blend has weights or counts, not both")
        for name, values in (("weights", self.weights), ("counts", self.counts)):
            if values is not None and len(values) != len(self.prefixes):
                raise ValueError(
                    f"the blend has {len(values)} {name} for {len(self.prefixes)} files"
                )
        if self.weights is not None:
            check_weights(self.weights)
        if self.counts is not None and (min(self.counts) < 0 or not any(self.counts)):
            raise ValueError(f"counts {list(self.counts)} must be >= 0, one of them above 0")

    @classmethod
    def parse(cls, items: str | Sequence[str]) -> Self:
        """Read a list of files (`a b`), or of weights and files in turn (`0.3 a 0.7 b`).

        A text is split at blanks. A file whose name is a number is written `./7`. ValueError
        when a number stands where a file should, or the other way round.
        """
        words = items.split() if isinstance(items, str) else [str(item) for item in items]
        numbers = [_number(word) for word in words]
        if all(number is None for number in numbers):
            return cls(prefixes=tuple(words))
        for place, number in enumerate(numbers):
            if (number is None) != (place % 2 == 1):
                expected = "a file" if place % 2 else "a weight"
                raise ValueError(
                    f"blend entry {place} is {words[place]!r} where {expected} should be; give "
                    "files alone, or weight and file in turn, for example 0.3 a 0.7 b"
                )
        if len(words) % 2:
            raise ValueError(f"the last weight of the blend, {words[-1]}, has no file")
        weights = tuple(number for number in numbers[::2] if number is not None)
        return cls(prefixes=tuple(words[1::2]), weights=weights)

    @classmethod
    def from_json(cls, entry: Any) -> Self:
        """Read a text or list as `parse` does, or `{"files": [...], "counts": [...]}`.

        In place of counts an object may have weights. ValueError or TypeError for anything else.
        """
        if isinstance(entry, str | list):
            return cls.parse(entry)
        if not isinstance(entry, dict):
            raise ValueError(f"a blend is a list, a text or an object, not {type(entry).__name__}")
        unknown = sorted(set(entry) - {"files", "counts", "weights"})
        if unknown or "files" not in entry:
            raise ValueError(f"keys are files, weights and counts, not {unknown or [*entry]}")
        found: dict[str, Any] = {}
        for name, key, kinds in (
            ("prefixes", "files", (str,)),
            ("weights", "weights", (int, float)),
            ("counts", "counts", (int,)),
        ):
            values = entry.get(key)
            if values is None and key != "files":
                continue
            if not isinstance(values, list) or not all(type(value) in kinds for value in values):
                what = {"files": "texts", "weights": "numbers", "counts": "whole numbers"}[key]
                raise ValueError(f"{key} is {values!r}, it must be a list of {what}")
            found[name] = tuple(values)
        return cls(**found)

    def names(self) -> list[str]:
        """Return a short name for each file: the last part of its path, where that is enough."""
        short = [Path(prefix).name for prefix in self.prefixes]
        return short if len(set(short)) == len(short) else list(self.prefixes)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


class BlendedDataset:
    """Samples of several datasets as one, in the order of a `BlendIndex`.

    A source of which more samples are asked for than it has begins again from its first.

    Args:
        datasets: the sources; None for one that the index never names.
        index: which sample comes from where.

    Raises:
        ValueError: the index names a source that is not there or has no samples.

    """

    def __init__(self, datasets: Sequence[SampleSource | None], index: BlendIndex) -> None:
        self.datasets = tuple(datasets)
        self.index = index
        counts = index.counts(len(self.datasets))
        if len(counts) > len(self.datasets):
            raise ValueError(f"the index names {len(counts)} sources of {len(self.datasets)}")
        for place, count in enumerate(counts.tolist()):
            source = self.datasets[place]
            if count and not (source and len(source)):
                raise ValueError(f"source {place} of the blend has no samples, {count} are drawn")

    @classmethod
    def by_weights(
        cls, datasets: Sequence[SampleSource | None], weights: Sequence[float], num_samples: int
    ) -> Self:
        """Mix `num_samples` samples by `weights` (of any sum)."""
        return cls(datasets, blend_index(weights, num_samples))

    @classmethod
    def by_counts(
        cls, datasets: Sequence[SampleSource], counts: Sequence[int] | None = None
    ) -> Self:
        """Mix `counts` samples of each dataset (default: each sample of each exactly once)."""
        taken = [len(dataset) for dataset in datasets] if counts is None else counts
        return cls(datasets, counted_blend_index(taken))

    def __len__(self) -> int:
        return len(self.index)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index` and which of its samples it is."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = int(self.index.sources[index])
        dataset = self.datasets[source]
        assert dataset is not None
        return source, int(self.index.samples[index]) % len(dataset)

    def __getitem__(self, index: int) -> Sample:
        source, sample = self.locate(index)
        dataset = self.datasets[source]
        assert dataset is not None
        return dataset[sample]

    def count(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        """Return how many of `sample_ids` come from each source, int64 [K]."""
        chosen = self.index.sources[np.asarray(sample_ids, np.int64)]
        return np.bincount(chosen, minlength=len(self.datasets)).astype(np.int64)


def _cached(
    parameters: dict[str, object], build: Callable[[], BlendIndex], cache_dir: str | Path | None
) -> BlendIndex:
    if cache_dir is None:
        return build()

    def arrays() -> dict[str, NDArray[Any]]:
        index = build()
        return {"sources": index.sources, "samples": index.samples}

    key = content_key({"kind": "blend", "version": _INDEX_VERSION, **parameters})
    return BlendIndex(**cached_arrays(Path(cache_dir), key, arrays, ("sources", "samples")))


@dataclass(frozen=True, kw_only=True)
class BlendPlan:
    """How a part of the data is made: the order, and how long every source must be.

    Attributes:
        index: the order of the blend.
        needed: samples to ask of each source; None: one epoch; 0: it is not opened.

    """

    index: BlendIndex
    needed: tuple[int | None, ...]


def plan_weights(
    weights: Sequence[float], num_samples: int, cache_dir: str | Path | None = None
) -> BlendPlan:
    """Plan a blend by weights of at least `num_samples`: every share is rounded up."""
    normal = check_weights(weights)
    shares = [math.ceil(num_samples * weight) for weight in normal.tolist()]
    total = sum(shares)
    index = _cached(
        {"weights": normal.tolist(), "num_samples": total},
        lambda: blend_index(normal.tolist(), total),
        cache_dir,
    )
    drawn = index.counts(len(shares)).tolist()
    needed = [max(math.ceil(s * (1 + _SURPLUS)), d) for s, d in zip(shares, drawn, strict=True)]
    return BlendPlan(index=index, needed=tuple(needed))


def plan_counts(counts: Sequence[int], cache_dir: str | Path | None = None) -> BlendPlan:
    """Plan a blend that takes `counts` samples of the sources."""
    index = _cached({"counts": list(counts)}, lambda: counted_blend_index(counts), cache_dir)
    return BlendPlan(index=index, needed=tuple(counts))


def plan_once(
    lengths: Sequence[int], num_samples: int | None, cache_dir: str | Path | None = None
) -> BlendPlan:
    """Plan a blend of sources of `lengths` samples: all of them once, or the first `num_samples`.

    The sources are opened for one epoch each, which is what their lengths are.
    """
    total = sum(lengths)
    once = (None,) * len(lengths)
    if num_samples is None:
        return BlendPlan(index=plan_counts(lengths, cache_dir).index, needed=once)
    size = min(num_samples, total)
    index = _cached(
        {"weights": list(lengths), "num_samples": size},
        lambda: blend_index(lengths, size),
        cache_dir,
    )
    return BlendPlan(index=index, needed=once)

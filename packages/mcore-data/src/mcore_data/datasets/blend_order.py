"""Which source each sample of a blend comes from: the order, without any data.

N samples, K sources. At step n the source is drawn that lacks most of its share, w_k * n - c_k
with c_k its samples so far (the first of equals), so that no source ever leads its share by a
whole sample. The rule, and so the order, is Megatron-LM's, but for one thing: a source of weight 0
is never drawn, even where all others have exactly their share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mcore_data.datasets import compiled

_FEW: Final = 24  # sources


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendIndex:
    """The index arrays.

    Attributes:
        sources: number of the source of each sample, [N], int16 (int32 above 32,767 sources).
        samples: which sample of that source it is, int64 [N]: 0, 1, 2, ... in each source.

    """

    sources: NDArray[np.integer[Any]]
    samples: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sources)

    def counts(self, num_sources: int) -> NDArray[np.int64]:
        """Return how many samples come from each source, int64 [K]."""
        return np.bincount(self.sources, minlength=num_sources).astype(np.int64)


def check_weights(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return `weights` divided by their sum, float64 [K]; ValueError when they are none."""
    values = np.array(weights, np.float64)
    for place, weight in enumerate(values.tolist()):
        if not np.isfinite(weight) or weight < 0:
            raise ValueError(f"weight {place} of the blend is {weight}, it must be a number >= 0")
    total = float(values.sum())
    if not 0 < total < np.inf:
        raise ValueError(f"the {len(values)} weights of the blend sum to {total}")
    normal: NDArray[np.float64] = values / total
    return normal


def blend_index(weights: Sequence[float], num_samples: int) -> BlendIndex:
    """Return the order of a blend of `num_samples` by weights (of any sum); a pure function.

    ValueError when a weight is negative or no number, or all are 0.
    """
    if num_samples < 0:
        raise ValueError(f"num_samples {num_samples} must be at least 0")
    normal = check_weights(weights)
    return _drawn(normal, np.where(normal > 0, -1, 0), num_samples)


def counted_blend_index(counts: Sequence[int]) -> BlendIndex:
    """Return the order of a blend that takes exactly `counts` [K] samples from the sources.

    Sources run dry at nearly the same time: each is drawn in proportion to its count.
    """
    limits = np.array(counts, np.int64)
    if len(limits) == 0 or limits.min() < 0 or not limits.any():
        raise ValueError(f"counts {list(counts)} of the blend must be >= 0, one of them above 0")
    return _drawn(limits / limits.sum(), limits, int(limits.sum()))


def scheduled_blend_index(phases: Sequence[tuple[Sequence[float], int]]) -> BlendIndex:
    """Return the order of a blend whose weights change: (weights, number of samples) of each phase.

    Every source goes on where the phase before left it, so that no sample is repeated or left
    out; within a phase the rule counts from its beginning. To change weights in the middle of a
    run, give the samples consumed so far as the length of the first phase.
    """
    if not phases:
        raise ValueError("a blend needs at least one phase")
    num_sources = len(phases[0][0])
    taken = np.zeros(num_sources, np.int64)
    parts = []
    for number, (weights, num_samples) in enumerate(phases):
        if len(weights) != num_sources:
            raise ValueError(
                f"phase {number} of the blend has {len(weights)} weights, phase 0 has {num_sources}"
            )
        part = blend_index(weights, num_samples)
        parts.append(BlendIndex(sources=part.sources, samples=part.samples + taken[part.sources]))
        taken += part.counts(num_sources)
    return BlendIndex(
        sources=np.concatenate([part.sources for part in parts]),
        samples=np.concatenate([part.samples for part in parts]),
    )


def continued_blend_index(
    weights: NDArray[np.float64], counts: NDArray[np.int64], num_samples: int
) -> BlendIndex:
    """Return the next `num_samples` of a blend by normal weights that has drawn `counts` [K]."""
    return _drawn(weights, np.where(weights > 0, -1, 0), num_samples, counts)


def _drawn(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64],
    num_samples: int,
    drawn: NDArray[np.int64] | None = None,
) -> BlendIndex:
    dtype = np.int16 if len(weights) <= np.iinfo(np.int16).max else np.int32
    sources: NDArray[np.integer[Any]] = np.empty(num_samples, dtype)
    samples = np.empty(num_samples, np.int64)
    counts = np.zeros(len(weights), np.int64) if drawn is None else drawn.copy()
    if num_samples * len(weights) >= compiled.WORTH_COMPILING and compiled.available():
        compiled.blend(weights, limits, counts, sources, samples)
    else:
        _draw(weights, limits, counts, sources, samples)
    return BlendIndex(sources=sources, samples=samples)


def _draw(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64],
    drawn: NDArray[np.int64],
    sources: NDArray[np.integer[Any]],
    samples: NDArray[np.int64],
) -> None:
    """Draw step by step; for a handful of sources plain numbers are faster than arrays."""
    if len(weights) <= _FEW:
        _draw_few(weights, limits, drawn, sources, samples)
        return
    counts = drawn.astype(np.float64)
    shares = np.where(limits == drawn, -np.inf, weights)
    lack = np.empty(len(weights), np.float64)
    first = int(drawn.sum())
    for place in range(len(sources)):
        np.multiply(shares, max(first + place, 1), out=lack)
        np.subtract(lack, counts, out=lack)
        best = int(lack.argmax())
        sources[place] = best
        samples[place] = counts[best]
        counts[best] += 1
        if counts[best] == limits[best]:
            shares[best] = -np.inf


def _draw_few(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64],
    drawn: NDArray[np.int64],
    sources: NDArray[np.integer[Any]],
    samples: NDArray[np.int64],
) -> None:
    shares, left = weights.tolist(), limits.tolist()
    counts = drawn.tolist()
    live = [k for k in range(len(shares)) if left[k] not in (0, counts[k])]
    first = sum(counts)
    for place in range(len(sources)):
        step = first + place or 1
        best, most = -1, -math.inf
        for k in live:
            lack = shares[k] * step - counts[k]
            if lack > most:
                best, most = k, lack
        sources[place] = best
        samples[place] = counts[best]
        counts[best] += 1
        if counts[best] == left[best]:
            live.remove(best)

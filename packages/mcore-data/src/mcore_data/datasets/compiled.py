"""Loops that numpy cannot express at speed, compiled by numba where it is installed.

Every function here has a numpy counterpart elsewhere with the same results to the last bit;
numba is the optional extra `fast`. Nothing is compiled before the first call.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WORTH_COMPILING: Final = 2_000_000
"""Entries from which loading the compiler pays."""

_DRAWS: Final = 1 << 18  # random words fetched at a time
_LENGTHS: Final = 1 << 12  # lengths gathered at a time


def available() -> bool:
    """Whether numba is installed (it is not imported)."""
    return importlib.util.find_spec("numba") is not None


@dataclass(frozen=True, kw_only=True)
class _Loops:
    swap: Callable[..., tuple[int, int]]
    starts: Callable[..., None]
    blend: Callable[..., None]


@functools.cache
def _loops() -> _Loops:
    import numba

    compiler: Any = numba.njit

    def jit(function: Callable[..., Any]) -> Callable[..., Any]:
        made: Callable[..., Any]
        try:
            made = compiler(nogil=True, cache=True)(function)
        except RuntimeError:  # no folder to keep compiled code in
            made = compiler(nogil=True)(function)
        return made

    return _Loops(swap=jit(_swap), starts=jit(_starts), blend=jit(_blend))


class Shuffler:
    """Shuffles arrays as `numpy.random.RandomState(seed).shuffle` does, one after another."""

    def __init__(self, seed: int) -> None:
        generator: Any = np.random.RandomState(seed)
        self._bits = generator._bit_generator
        self._draws: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._next = 0
        self._places: NDArray[np.int32] = np.empty(_DRAWS, np.int32)

    def shuffle(self, values: NDArray[Any]) -> None:
        """Shuffle a contiguous array of 32-bit values in place; fewer than 2^31 of them."""
        view = values.view(np.int32)
        last = len(view) - 1
        while last > 0:
            if self._next == len(self._draws):
                self._draws, self._next = self._bits.random_raw(_DRAWS), 0
            last, self._next = _loops().swap(view, last, self._draws, self._next, self._places)


def sample_starts(
    lengths: NDArray[np.int32], order: NDArray[np.int32], seq_length: int, extra: int, num: int
) -> NDArray[np.int32]:
    """Return where each sample starts, [num + 1, 2]; see `gpt_index`.

    The last boundary is right only if it lies `num * seq_length` tokens from the start.
    """
    starts = np.empty((num + 1, 2), np.int32)
    _loops().starts(lengths, order, seq_length, extra, starts)
    return starts


def blend(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64],
    counts: NDArray[np.int64],
    sources: NDArray[Any],
    samples: NDArray[np.int64],
) -> None:
    """Fill `sources` and `samples` as `blend_index` does; `limits` < 0: none.

    `counts`: what has been drawn before; it is changed.
    """
    _loops().blend(weights, limits, counts, sources, samples)


def _swap(values, last, draws, first, places):  # type: ignore[no-untyped-def]
    """Swap down from `last` with the draws from `first`; return how far both came.

    Places are picked first, without a branch on them, and swapped afterwards: the processor then
    fetches many places at a time.
    """
    mask = np.uint32(last)
    mask |= mask >> np.uint32(1)
    mask |= mask >> np.uint32(2)
    mask |= mask >> np.uint32(4)
    mask |= mask >> np.uint32(8)
    mask |= mask >> np.uint32(16)
    at, count, left = first, np.int64(0), last
    while at < len(draws) and left > 0:
        low = np.int64(mask >> np.uint32(1))
        stop = min(len(draws), at + (left - low))  # so far the mask cannot change
        for i in range(at, stop):
            place = np.int64(np.uint32(draws[i]) & mask)
            places[count] = place
            taken = np.int64(place <= left)
            count += taken
            left -= taken
        at = stop
        if left <= low:
            mask >>= np.uint32(1)
    for i in range(count):
        other = places[i]
        value = values[last - i]
        values[last - i] = values[other]
        values[other] = value
    return left, at


def _starts(lengths, order, seq_length, extra, starts):  # type: ignore[no-untyped-def]
    buffer = np.empty(_LENGTHS, np.int32)
    cut, total, row = seq_length, 0, 1
    starts[0, 0] = 0
    starts[0, 1] = 0
    for first in range(0, len(order), len(buffer)):
        stop = min(first + len(buffer), len(order))
        for i in range(first, stop):  # apart, so that many lengths are fetched at a time
            buffer[i - first] = lengths[order[i]]
        for i in range(first, stop):
            # Without the extra token a boundary may lie behind the last token of a document.
            end = total + buffer[i - first] + 1 - extra
            while cut < end and row < len(starts):
                starts[row, 0] = i
                starts[row, 1] = cut - total
                row += 1
                cut += seq_length
            total += buffer[i - first]


def _blend(weights, limits, counts, sources, samples):  # type: ignore[no-untyped-def]
    first = counts.sum()
    for i in range(len(sources)):
        step = max(first + i, 1)
        best = -1
        most = 0.0
        for k in range(len(weights)):
            if 0 <= limits[k] <= counts[k]:
                continue
            lack = weights[k] * step - counts[k]
            if best < 0 or lack > most:
                best, most = k, lack
        sources[i] = best
        samples[i] = counts[best]
        counts[best] += 1

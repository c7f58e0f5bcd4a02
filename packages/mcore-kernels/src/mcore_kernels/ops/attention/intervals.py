"""Which keys each query sees, as an interval, and the blocks of them that a kernel has to visit.

Segments lie one after another, and so do the keys that a query of a segment sees: from some key of
its segment to some other. Both ends never move back from one query to the next that sees a key,
so that the blocks of keys seen by a block of queries are neighbours, too.

Shapes: T tokens, N segments, b blocks of queries, c blocks of keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mcore_kernels.ops.attention.base import Segments, Visibility

BLOCK = 128
"""Queries and keys of a block: what the kernels visit or leave out as a whole."""

KEPT = 8
"""Masks that are kept: those of a few micro-batches, with and without a window."""

_FAR = torch.iinfo(torch.int32).max


def intervals(
    q: Tensor, k: Tensor, segments: Segments, visibility: Visibility
) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the first behind those: two [T] of int32.

    Queries that see none, and those of no segment, have an empty interval. Of equal segments it is
    that of one [S]. No length is read back from the device.
    """
    device = q.device
    if segments.uniform is not None:
        place = torch.arange(segments.uniform[1], device=device)
        start, end = torch.zeros_like(place), torch.full_like(place, segments.uniform[1])
    else:
        ends_q, ends_k = segments.cu_seqlens_q.long(), segments.cu_seqlens_k.long()
        row = torch.arange(q.shape[0], device=device)
        segment = torch.searchsorted(ends_q[1:].contiguous(), row, right=True)
        follows = (segment + 1).clamp_max(ends_q.shape[0] - 1)
        start, end = ends_k[segment], ends_k[follows]
        # A segment's last query stands at its last key.
        place = row - ends_q[follows] + end
    window = visibility.window
    if window is not None:
        start = torch.maximum(start, place - window + 1)
        end = end if visibility.causal else torch.minimum(end, place + window)
    if visibility.causal:
        end = torch.minimum(end, place + 1)
    return start.int(), end.int()


def block_mask(q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> BlockMask:
    """The mask of these segments for `flex_attention`: of all rows, or of one of equal segments.

    Blocks that every query of theirs sees whole are told apart from those that need the mask.
    """
    start, end = intervals(q, k, segments, visibility)
    keys = k.shape[0] if segments.uniform is None else segments.uniform[1]

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= start[query]) & (key < end[query])

    partly, whole = _blocks(start, end, keys)
    return BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(start.shape[0], keys)
    )


def _blocks(
    start: Tensor, end: Tensor, keys: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Blocks of keys partly and wholly seen: numbers [1, 1, b], and places [1, 1, b, c]."""
    blocks = -(-start.shape[0] // BLOCK)
    rest = blocks * BLOCK - start.shape[0]
    blind = F.pad(end <= start, (0, rest), value=True).view(blocks, BLOCK)
    start, end = (F.pad(x, (0, rest)).view(blocks, BLOCK) for x in (start, end))
    first = start.masked_fill(blind, _FAR).amin(1) // BLOCK
    last = (end.masked_fill(blind, 0).amax(1) + BLOCK - 1) // BLOCK
    first = torch.minimum(first, last)  # nothing is seen
    # Between these every query of the block sees every key.
    whole_first = (start.amax(1) + BLOCK - 1) // BLOCK
    whole_last = end.amin(1) // BLOCK
    none = blind.any(1) | (whole_first >= whole_last)
    whole_first, whole_last = (torch.where(none, last, x) for x in (whole_first, whole_last))
    count = torch.arange(-(-keys // BLOCK), device=start.device, dtype=torch.int32)
    gap = (whole_last - whole_first).unsqueeze(1)
    partly = first.unsqueeze(1) + count
    partly = torch.where(partly >= whole_first.unsqueeze(1), partly + gap, partly)
    whole = whole_first.unsqueeze(1) + count
    numbers = (last - first - (whole_last - whole_first), whole_last - whole_first)
    # Past a row's number its places say nothing, but are read.
    places = (x.clamp_max(count.shape[0] - 1) for x in (partly, whole))
    one, other = (
        (number.int().contiguous()[None, None], place.int().contiguous()[None, None])
        for number, place in zip(numbers, places, strict=True)
    )
    return one, other


Make: TypeAlias = Callable[[Tensor, Tensor, Segments, Visibility], BlockMask]


class MaskCache:
    """The masks of the last layouts: all layers of a step, and its backward, ask for the same.

    A layout is found again by its own tensors, unchanged. While a CUDA graph is captured or a
    compiler traces, every mask is built anew: it belongs to what is recorded.
    """

    def __init__(self) -> None:
        """It begins with none."""
        self._kept: tuple[tuple[tuple[Any, ...], BlockMask], ...] = ()

    def get(
        self, make: Make, q: Tensor, k: Tensor, segments: Segments, visibility: Visibility
    ) -> BlockMask:
        """The mask that `make` builds of these arguments, perhaps one built before."""
        if not _may_keep(q, segments):
            return make(q, k, segments, visibility)
        key = _key(q, k, segments, visibility)
        for known, mask in self._kept:
            if known == key:
                return mask
        with torch.no_grad():
            mask = make(q, k, segments, visibility)
        # Replaced as a whole: another thread, such as that of a backward pass, may be reading.
        self._kept = ((key, mask), *self._kept[: KEPT - 1])
        return mask


def _may_keep(q: Tensor, segments: Segments) -> bool:
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    # Tensors made in inference mode do not say whether they were changed.
    return segments.uniform is not None or not (
        segments.cu_seqlens_q.is_inference() or segments.cu_seqlens_k.is_inference()
    )


def _key(q: Tensor, k: Tensor, segments: Segments, visibility: Visibility) -> tuple[Any, ...]:
    key: tuple[Any, ...] = (
        q.shape[0], k.shape[0], q.device, segments.uniform, visibility.causal, visibility.window,
        # Its own tensors are of inference mode then, which no gradient can be made with.
        torch.is_inference_mode_enabled(),
        torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else None,
    )  # fmt: skip
    if segments.uniform is not None:
        return key
    for ends in (segments.cu_seqlens_q, segments.cu_seqlens_k):
        key += (_Same(ends), ends._version)
    return key


class _Same:
    """Equal to another of the same tensor, while that lives."""

    def __init__(self, x: Tensor) -> None:
        self._ref = weakref.ref(x)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        one = self._ref()
        return one is not None and one is other._ref()

    __hash__ = None  # type: ignore[assignment]

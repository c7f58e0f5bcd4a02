"""What layers keep of earlier tokens, such as keys and values, and states of recurrent layers.

K kv heads of this rank, D head size, T new tokens of a forward pass, N sequences in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Rows = slice | Tensor
"""Slots of the pool: a slice where they lie in one piece, else indices int64."""


@dataclass(kw_only=True)
class _Span:
    """A sequence's stretch of token slots, the first `length` of them filled; its state slot."""

    start: int
    capacity: int
    state: int
    length: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.capacity


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Where a forward pass writes and reads.

    `begun` [N] tells which sequences had tokens before; None when all of them had.
    """

    write: Rows
    read: Rows
    cu_seqlens: Tensor
    max_seqlen: int
    states: Rows
    all_new: bool
    begun: Tensor | None


class ContiguousCache:
    """A pool of token slots in every layer, of which each open sequence has one stretch.

    Satisfies `mcore_models.KVCache`. `open` gives a sequence its slots, `close` gives them back.
    Before each forward pass `begin` says how many new tokens each sequence brings; every attention
    layer then calls `extend` (or `append`, with whatever it keeps of a token) once, every recurrent
    layer `recall` and `keep`, which have a second pool with one slot per sequence. A layer's
    tensors are made at its first use, so that a pipeline stage holds only its own layers, and a
    layer only what it needs; they grow with what is open, and go when nothing is.
    """

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self._opened = 0
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._pass: _Pass | None = None

    @property
    def num_slots(self) -> int:
        """Slots that the pool needs for what is open."""
        return max((span.stop for span in self._spans.values()), default=0)

    @property
    def num_states(self) -> int:
        """State slots that the pool needs for what is open."""
        return max((span.state + 1 for span in self._spans.values()), default=0)

    def open(self, capacity: int) -> int:
        """Reserve `capacity` slots in the first gap that is wide enough; return the sequence's id.

        Raises:
            ValueError: `capacity` is not positive.
        """
        if capacity < 1:
            raise ValueError(f"a sequence needs at least 1 token slot, not {capacity}")
        start = 0
        for span in sorted(self._spans.values(), key=lambda span: span.start):
            if span.start - start >= capacity:
                break
            start = span.stop
        sequence = self._opened
        self._opened += 1
        taken = {span.state for span in self._spans.values()}
        state = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._spans[sequence] = _Span(start=start, capacity=capacity, state=state)
        return sequence

    def close(self, sequence: int) -> None:
        """Give the slots of a sequence back."""
        del self._spans[sequence]
        if not self._spans:
            self._layers.clear()
            self._states.clear()

    def length(self, sequence: int) -> int:
        """Return how many tokens of a sequence are cached."""
        return self._spans[sequence].length

    def begin(self, new: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Start a pass over new tokens: pairs (sequence, how many), in the order of the batch.

        Raises:
            ValueError: a sequence would outgrow its slots; nothing has changed.
        """
        spans = [self._spans[sequence] for sequence, _ in new]
        for span, (sequence, count) in zip(spans, new, strict=True):
            if span.length + count > span.capacity:
                raise ValueError(
                    f"sequence {sequence} needs {span.length + count} token slots and has "
                    f"{span.capacity}"
                )
        begun = [span.length > 0 for span in spans]
        write: list[tuple[int, int]] = []
        read: list[tuple[int, int]] = []
        for span, (_, count) in zip(spans, new, strict=True):
            end = span.start + span.length + count
            write.append((end - count, end))
            read.append((span.start, end))
            span.length += count
        lengths = [span.length for span in spans]
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        self._pass = _Pass(
            write=_rows(write, device),
            read=_rows(read, device),
            cu_seqlens=bounds.to(device, torch.int32),
            max_seqlen=max(lengths),
            states=_rows([(span.state, span.state + 1) for span in spans], device),
            all_new=not any(begun),
            begun=None if all(begun) else torch.tensor(begun, device=device),
        )

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """See `mcore_models.KVCache.extend`: k and v are [T, K, D] of the tokens of this pass.

        The keys and values returned may be views of the pool: read them before the next pass.
        """
        (keys, values), cu_seqlens, max_seqlen = self.append(layer, (k, v))
        return keys, values, cu_seqlens, max_seqlen

    def append(
        self, layer: int, rows: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor, int]:
        """See `mcore_models.KVCache.append`: each of `rows` is [T, …] of the tokens of this pass.

        What is returned may be views of the pool: read it before the next pass.
        """
        now = self._pass
        assert now is not None, "begin comes before append"
        old = self._layers.get(layer, (None,) * len(rows))
        pools = tuple(_pool(a, b, self.num_slots) for a, b in zip(old, rows, strict=True))
        self._layers[layer] = pools
        for pool, new in zip(pools, rows, strict=True):
            _put(pool, now.write, new)
        return tuple(_take(pool, now.read) for pool in pools), now.cu_seqlens, now.max_seqlen

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        """See `mcore_models.KVCache.recall`; may be views of the pool, read them before `keep`."""
        now = self._pass
        assert now is not None, "begin comes before recall"
        if now.all_new:
            return None
        pools = tuple(_pool(pool, pool, self.num_states) for pool in self._states[layer])
        self._states[layer] = pools
        states = tuple(_take(pool, now.states) for pool in pools)
        if now.begun is None:
            return states
        # The slot of a new sequence still holds what its last one left there.
        shapes = [(-1, *[1] * (state.dim() - 1)) for state in states]
        return tuple(
            torch.where(now.begun.view(shape), state, 0.0)
            for state, shape in zip(states, shapes, strict=True)
        )

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """See `mcore_models.KVCache.keep`: each of `states` is [N, …] in the order of this pass."""
        now = self._pass
        assert now is not None, "begin comes before keep"
        old = self._states.get(layer, (None,) * len(states))
        pools = tuple(_pool(a, b, self.num_states) for a, b in zip(old, states, strict=True))
        self._states[layer] = pools
        for pool, state in zip(pools, states, strict=True):
            _put(pool, now.states, state)


def _rows(stretches: list[tuple[int, int]], device: torch.device) -> Rows:
    if all(stop == start for (_, stop), (start, _) in pairwise(stretches)):
        return slice(stretches[0][0], stretches[-1][1])
    return torch.cat([torch.arange(a, b) for a, b in stretches]).to(device)


def _pool(old: Tensor | None, like: Tensor, slots: int) -> Tensor:
    """Return `old` with room for `slots` rows shaped like those of `like`."""
    if old is not None and old.shape[0] >= slots:
        return old
    # Not zeros: a slot is written before it is read, and untouched memory costs nothing.
    new = like.new_empty(slots, *like.shape[1:])
    if old is not None:
        new[: old.shape[0]] = old
    return new


def _put(pool: Tensor, rows: Rows, new: Tensor) -> None:
    if isinstance(rows, slice):
        pool[rows] = new
    else:
        pool.index_copy_(0, rows, new)


def _take(pool: Tensor, rows: Rows) -> Tensor:
    return pool[rows] if isinstance(rows, slice) else pool.index_select(0, rows)

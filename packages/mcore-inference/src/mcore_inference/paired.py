"""What an encoder-decoder keeps of two texts, behind the face of one."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_inference.cache import ContiguousCache


class PairedCache:
    """The caches of a source, which is read once, and of the text that is written.

    Satisfies `mcore_models.common.text.PairedCache`; its own methods are those of the written text.
    A sequence is its source and then what was written, without the token that the decoder starts
    from. It has room for either to be all of it.
    """

    def __init__(self) -> None:
        self.source = ContiguousCache()
        self.written = ContiguousCache()

    @property
    def num_slots(self) -> int:
        """Slots that the larger of the two pools needs for what is open."""
        return max(self.source.num_slots, self.written.num_slots)

    def open(self, capacity: int) -> int:
        """As `ContiguousCache.open`."""
        sequence = self.written.open(capacity)
        same = self.source.open(capacity)
        assert sequence == same
        return sequence

    def close(self, sequence: int) -> None:
        """Give the slots of a sequence back."""
        self.written.close(sequence)
        self.source.close(sequence)

    def length(self, sequence: int) -> int:
        """Return how many tokens of a sequence are cached, the one that starts it left out."""
        read, written = self.source.length(sequence), self.written.length(sequence)
        return read + max(written - 1, 0)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """See `mcore_models.KVCache.extend`."""
        return self.written.extend(layer, k, v)

    def append(
        self, layer: int, rows: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Tensor, int]:
        """See `mcore_models.KVCache.append`."""
        return self.written.append(layer, rows)

    def recall(self, layer: int) -> tuple[Tensor, ...] | None:
        """See `mcore_models.KVCache.recall`."""
        return self.written.recall(layer)

    def keep(self, layer: int, states: tuple[Tensor, ...]) -> None:
        """See `mcore_models.KVCache.keep`."""
        self.written.keep(layer, states)

    def begin(
        self,
        read: list[tuple[int, list[int]]],
        written: list[tuple[int, list[int]]],
        device: torch.device,
    ) -> None:
        """Start a pass over new tokens of both texts of the same sequences, in one order."""
        for cache, new in ((self.source, read), (self.written, written)):
            cache.begin([(sequence, len(tokens)) for sequence, tokens in new], device)

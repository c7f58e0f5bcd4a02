"""Keys and values of earlier tokens.

N sequences, K kv heads of this rank, D head size, T new tokens of a forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ContiguousCache:
    """A block of `capacity` token slots for each of N sequences, in every layer.

    Satisfies `mcore_models.KVCache`. Before each forward pass `begin` says how many new tokens each
    sequence brings; every layer then calls `extend` once. A layer's tensors are allocated at its
    first use, so that a pipeline stage holds only its own layers.
    """

    def __init__(self, num_sequences: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * num_sequences
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._write = torch.empty(0, dtype=torch.int64)
        self._read = torch.empty(0, dtype=torch.int64)
        self._cu_seqlens = torch.zeros(1, dtype=torch.int32)
        self._max_seqlen = 0

    def begin(self, new_tokens: list[int], device: torch.device) -> None:
        """Make room for `new_tokens[n]` more tokens of sequence n (0: it sits this pass out).

        Raises:
            ValueError: a sequence would outgrow the capacity.
        """
        write: list[Tensor] = []
        read: list[Tensor] = []
        for n, count in enumerate(new_tokens):
            end = self.lengths[n] + count
            if end > self.capacity:
                raise ValueError(
                    f"sequence {n} needs {end} token slots and the cache has {self.capacity}"
                )
            if count:
                base = n * self.capacity
                write.append(torch.arange(base + self.lengths[n], base + end))
                read.append(torch.arange(base, base + end))
                self.lengths[n] = end
        sizes = torch.tensor([0, *(len(rows) for rows in read)])
        self._write = torch.cat(write).to(device)
        self._read = torch.cat(read).to(device)
        self._cu_seqlens = sizes.cumsum(0).to(device, torch.int32)
        self._max_seqlen = int(sizes.max())

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """See `mcore_models.KVCache.extend`: k and v are [T, K, D] of the tokens of this pass."""
        if layer not in self._layers:
            slots = len(self.lengths) * self.capacity
            self._layers[layer] = (
                k.new_zeros(slots, *k.shape[1:]),
                v.new_zeros(slots, *v.shape[1:]),
            )
        keys, values = self._layers[layer]
        keys[self._write] = k
        values[self._write] = v
        return keys[self._read], values[self._read], self._cu_seqlens, self._max_seqlen

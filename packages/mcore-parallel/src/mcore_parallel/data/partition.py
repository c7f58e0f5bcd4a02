"""How the parameters of a bucket are laid out in it, and so which rank of the group owns which.

A bucket is one flat buffer, cut into equal consecutive shards, one for each rank of the group over
which its gradients are reduced. A partition chooses where each parameter starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_ALIGNMENT = 64
"""Elements. Parameters start, and shards are cut, at multiples of it: 128 bytes for 16-bit types,
which is what fast kernels and collectives ask of an address."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the tensors of a bucket lie.

    offsets: first element of each. shard_numel: elements of each shard; shard r is
    `[r · shard_numel, (r + 1) · shard_numel)`. keeps_shape: no tensor is cut by a
    shard's border, and update rules see each one in its own shape.
    """

    offsets: tuple[int, ...]
    shard_numel: int
    keeps_shape: bool


Partition: TypeAlias = Callable[[Sequence[int], int], Placement]
"""(numbers of elements, number of shards) -> Placement; the same on every rank."""


def flat(sizes: Sequence[int], num_shards: int) -> Placement:
    """Lay tensors one after another and cut the whole into equal slices, through tensors.

    For update rules that treat elements alike, such as Adam. The shards are as balanced as can be;
    the last ones may hold nothing.
    """
    offsets, end = _consecutive(sizes)
    return Placement(
        offsets=offsets, shard_numel=_aligned(-(-end // num_shards)), keeps_shape=False
    )


def whole(sizes: Sequence[int], num_shards: int) -> Placement:
    """Give every tensor to one shard as a whole, largest first to the emptiest shard.

    For update rules that need matrices, such as Muon. The bucket is as large as its fullest shard
    times their number.
    """
    loads = [0] * num_shards
    offsets = [0] * len(sizes)
    shards = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        shards[i] = loads.index(min(loads))
        offsets[i] = loads[shards[i]]
        loads[shards[i]] += _aligned(sizes[i])
    shard_numel = max(loads)
    starts = (shard * shard_numel + at for shard, at in zip(shards, offsets, strict=True))
    return Placement(offsets=tuple(starts), shard_numel=shard_numel, keeps_shape=True)


def _consecutive(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    offsets = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += _aligned(size)
    return tuple(offsets), end


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

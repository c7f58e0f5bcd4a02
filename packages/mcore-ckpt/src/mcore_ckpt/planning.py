"""Who writes which chunk, and what has to be exchanged for it.

Pure arithmetic: every rank computes the same plan from the same descriptions.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.alike import Alike
from mcore_ckpt.codecs import Codec
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.grid import chunk_shape, file_shape
from mcore_ckpt.holdings import Tensor, check_holdings, find_holdings
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.names import check_tensor_names
from mcore_parallel.layout import (
    Box,
    Copy,
    Fragment,
    LayoutTensor,
    Place,
    TensorLayout,
)
from mcore_parallel.layout.plan import collecting_paused

_IMBALANCE = 1.1  # a rank may write this many times the average before it hands chunks over


@dataclass(frozen=True)
class Chunk:
    """File `number` of the global tensor `name`, and its writer (a rank within the group).

    It holds one chunk, or many (see `TensorInfo.files`).
    """

    name: str
    number: int
    writer: int

    @property
    def key(self) -> str:
        """Name of the buffer that the chunk is put together in."""
        return f"{self.name}#{self.number}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """Chunks that are put together and written at one time, within the bound on staging memory."""

    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...]

    def of(self, rank: int) -> list[Chunk]:
        """Return the chunks that `rank` (within the group) writes."""
        return [chunk for chunk in self.chunks if chunk.writer == rank]


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """The global tensors of a checkpoint, and how the ranks write them in rounds."""

    tensors: Mapping[str, TensorInfo]
    rounds: tuple[Round, ...]


def describe(tensors: Mapping[str, LayoutTensor]) -> dict[str, Any]:
    """Return the dtypes and layouts of some local tensors as plain JSON values.

    Raises:
        ValueError: a tensor has a dtype that the format does not have.
    """
    described = {}
    for key, value in tensors.items():
        try:
            dtype = stored_type(value.tensor.dtype).name
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        fragments = [
            [
                f.name,
                f.global_shape,
                f.box.start,
                f.box.shape,
                f.offset,
                f.strides,
                f.replica,
                f.num_replicas,
            ]
            for f in value.layout.fragments
        ]
        described[key] = {"dtype": dtype, "shape": value.layout.shape, "fragments": fragments}
    return described


def layouts_of(description: Mapping[str, Any]) -> dict[str, TensorLayout]:
    """Return the layouts that `describe` wrote down, by local key."""
    return {
        key: TensorLayout(
            shape=tuple(entry["shape"]), fragments=tuple(map(_fragment, entry["fragments"]))
        )
        for key, entry in description.items()
    }


def _fragment(row: Sequence[Any]) -> Fragment:
    name, global_shape, start, shape, offset, strides, replica, count = row
    return Fragment(
        name=name,
        global_shape=tuple(global_shape),
        box=Box(tuple(start), tuple(shape)),
        offset=offset,
        strides=tuple(strides),
        replica=replica,
        num_replicas=count,
    )


def plan_save(
    kinds: Sequence[Alike],
    ranks: Sequence[int],
    *,
    chunk_bytes: int,
    exchange_bytes: int,
    codec: Codec | None = None,
    file_bytes: int | None = None,
) -> WritePlan:
    """Return how the ranks write what they have described.

    kinds: what they have described (see `alike`). ranks: the group's torch.distributed ranks.
    exchange_bytes: bound on the chunks that one rank puts together in a round (a single larger
    chunk passes). codec: what compresses chunks. file_bytes: bound on files of many chunks; None:
    each has one.

    Raises:
        ValueError: ranks disagree on a tensor's dtype or shape, or their fragments do not tile it
            exactly once per replica; names the tensor.
    """
    with collecting_paused():
        tensors = find_holdings(
            kinds, lambda dtype, shape: tensor_info(dtype, shape, chunk_bytes, codec, file_bytes)
        )
        check_tensor_names(tensors)
        check_holdings(tensors)
        chunks = _assign(tensors, kinds, len(ranks))
        return WritePlan(
            tensors={name: tensor.held.info for name, tensor in tensors.items()},
            rounds=tuple(_rounds(chunks, tensors, kinds, ranks, exchange_bytes)),
        )


def _rounds(
    chunks: Sequence[Chunk],
    tensors: Mapping[str, Tensor],
    kinds: Sequence[Alike],
    ranks: Sequence[int],
    exchange_bytes: int,
) -> list[Round]:
    """Return the rounds in which the chunks are written, with the copies that it takes.

    The ranks that stand at the same place within their kinds copy among themselves: together they
    hold everything that they are to write, each other element once. Of kinds that hold the same
    part, the one takes a copy whose rank there has sent least so far.
    """
    members = [[ranks[rank] for rank in kind.ranks] for kind in kinds]
    where = {
        rank: (number, place)
        for number, kind in enumerate(kinds)
        for place, rank in enumerate(kind.ranks)
    }
    sent: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # by place and kind
    staged: dict[int, int] = defaultdict(int)
    current: dict[int, int] = defaultdict(int)
    rounds: list[tuple[list[Chunk], list[Copy]]] = []
    for chunk in chunks:
        held, keys, offsets = tensors[chunk.name]
        writer, size = chunk.writer, held.file_bytes
        if staged[writer] and staged[writer] + size > exchange_bytes:
            current[writer] += 1
            staged[writer] = 0
        staged[writer] += size
        if current[writer] == len(rounds):
            rounds.append(([], []))
        some_chunks, copies = rounds[current[writer]]
        some_chunks.append(chunk)
        kind, place = where[writer]
        of_place, rank, key, name = sent[place], ranks[writer], chunk.key, chunk.name
        for box, numel, offset, strides, origins in held.pieces(chunk.number, kind):
            origin = origins[0]
            if len(origins) > 1:
                origin = min(origins, key=lambda origin: of_place[origin.kind])
            some = members[origin.kind]
            source = some[place % len(some)]
            if source != rank:
                of_place[origin.kind] += numel
            begin = offsets[origin.part] + origin.distance
            copies.append(
                Copy(
                    name,
                    box,
                    Place(source, keys[origin.part], begin, origin.strides),
                    Place(rank, key, offset, strides),
                )
            )
    return [Round(chunks=tuple(some), copies=tuple(copies)) for some, copies in rounds]


def tensor_table(
    descriptions: Mapping[int, Mapping[str, Any]],
    chunk_bytes: int,
    codec: Codec | None = None,
    file_bytes: int | None = None,
) -> dict[str, TensorInfo]:
    """Return the global tensors that some ranks have described, sorted by name.

    Raises:
        ValueError: ranks disagree on a tensor's dtype.
    """
    tensors: dict[str, TensorInfo] = {}
    first_rank: dict[str, int] = {}
    for rank, description in descriptions.items():
        for entry in description.values():
            dtype = entry["dtype"]
            for row in entry["fragments"]:
                name, shape = row[0], tuple(row[1])
                if name not in tensors:
                    tensors[name] = tensor_info(dtype, shape, chunk_bytes, codec, file_bytes)
                    first_rank[name] = rank
                elif tensors[name].dtype != dtype:
                    raise ValueError(
                        f"{name}: rank {first_rank[name]} holds it as {tensors[name].dtype}, "
                        f"rank {rank} as {dtype}"
                    )
    return dict(sorted(tensors.items()))


def tensor_info(
    dtype: str,
    shape: tuple[int, ...],
    chunk_bytes: int,
    codec: Codec | None = None,
    file_bytes: int | None = None,
) -> TensorInfo:
    """Return how a tensor will lie on disk: what it is cut into depends on nothing else."""
    itemsize = stored_type(dtype).itemsize
    cut = chunk_shape(shape, itemsize, chunk_bytes)
    files = None if file_bytes is None else file_shape(shape, cut, itemsize, file_bytes)
    return TensorInfo(dtype=dtype, shape=shape, chunk_shape=cut, codec=codec, file_shape=files)


def _assign(tensors: Mapping[str, Tensor], kinds: Sequence[Alike], num_ranks: int) -> list[Chunk]:
    """Give each chunk one writer: where most of it is, with no rank writing much more than others.

    First every chunk goes to the rank that holds most of it; of replicas, to the one with the least
    to write so far, large chunks first. Then ranks above the average hand chunks over, those first
    that they hold least of.
    """
    size: list[int] = []
    held: list[dict[int, int]] = []  # for each chunk, how many of its elements which kinds hold
    for tensor in tensors.values():
        size += tensor.held.sizes
        held += tensor.held.elements
    load = [0] * num_ranks
    writer = [0] * len(size)
    kind_of = {rank: number for number, kind in enumerate(kinds) for rank in kind.ranks}
    idlest = [[(0, rank) for rank in kind.ranks] for kind in kinds]  # heaps
    for chunk in sorted(range(len(size)), key=lambda chunk: -size[chunk]):
        holders = held[chunk]
        if len(holders) == 1:
            (chosen,) = holders
        else:
            chosen = min(holders, key=lambda kind: (-holders[kind], idlest[kind][0]))
        writer[chunk] = rank = idlest[chosen][0][1]
        load[rank] += size[chunk]
        heapq.heapreplace(idlest[chosen], (load[rank], rank))
    limit = _IMBALANCE * sum(load) / len(load)
    by_load = [(value, rank) for rank, value in enumerate(load)]
    heapq.heapify(by_load)
    for chunk in sorted(
        range(len(size)), key=lambda chunk: held[chunk].get(kind_of[writer[chunk]], 0)
    ):
        giver = writer[chunk]
        idle_load, idle = by_load[0]
        if load[giver] > limit and idle_load + size[chunk] < load[giver]:
            load[giver] -= size[chunk]
            load[idle] += size[chunk]
            writer[chunk] = idle
            heapq.heapreplace(by_load, (load[idle], idle))
            # The giver's entry is too high now; it only makes the giver look busier than it is.
    writers = iter(writer)
    return [
        Chunk(name, number, next(writers))
        for name, tensor in tensors.items()
        for number in range(len(tensor.held.sizes))
    ]

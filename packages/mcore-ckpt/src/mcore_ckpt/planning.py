"""Who writes which chunk, and what has to be exchanged for it.

Pure arithmetic: every rank computes the same plan from the same descriptions.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.alike import Alike, check_kinds, fragment
from mcore_ckpt.codecs import Codec
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.grid import Grid, chunk_shape, file_shape
from mcore_ckpt.manifest import TensorInfo
from mcore_ckpt.names import check_tensor_names
from mcore_parallel.layout import (
    Box,
    Copy,
    Fragment,
    LayoutTensor,
    TensorLayout,
    plan,
    row_major_strides,
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
            shape=tuple(entry["shape"]), fragments=tuple(map(fragment, entry["fragments"]))
        )
        for key, entry in description.items()
    }


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
        descriptions = {kind.ranks[0]: kind.description for kind in kinds}
        tensors = tensor_table(descriptions, chunk_bytes, codec, file_bytes)
        check_tensor_names(tensors)
        check_kinds(kinds)
        boxes = _boxes(tensors)
        chunks = _assign(tensors, boxes, kinds, len(ranks))
        copies = _copies(tensors, boxes, chunks, kinds, ranks)
        rounds = tuple(_rounds(chunks, copies, tensors, exchange_bytes))
        return WritePlan(tensors=tensors, rounds=rounds)


def _copies(
    tensors: Mapping[str, TensorInfo],
    boxes: Mapping[Grid, Sequence[Box]],
    chunks: Sequence[Chunk],
    kinds: Sequence[Alike],
    ranks: Sequence[int],
) -> list[Copy]:
    """Return what is copied where to put the chunks together.

    The ranks that stand at the same place within their kinds do it among themselves: together they
    hold everything that they are to write, each other element once.
    """
    place = {rank: i for kind in kinds for i, rank in enumerate(kind.ranks)}
    holders: dict[str, list[tuple[Alike, str]]] = defaultdict(list)
    for kind in kinds:
        for key, layout in kind.layouts.items():
            for name in {f.name for f in layout.fragments}:
                holders[name].append((kind, key))
    written: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        written[place[chunk.writer]].append(chunk)
    copies: list[Copy] = []
    for at, some in sorted(written.items()):
        sources: dict[int, dict[str, TensorLayout]] = defaultdict(dict)
        for name in {chunk.name for chunk in some}:
            for kind, key in holders[name]:
                rank = ranks[kind.ranks[at % len(kind.ranks)]]
                sources[rank][key] = kind.layouts[key]
        targets: dict[int, dict[str, TensorLayout]] = defaultdict(dict)
        for chunk in some:
            info = tensors[chunk.name]
            layout = _chunk_layout(chunk.name, info, boxes[info.files][chunk.number])
            targets[ranks[chunk.writer]][chunk.key] = layout
        copies += plan(sources, targets)
    return copies


def _chunk_layout(name: str, info: TensorInfo, box: Box) -> TensorLayout:
    """Return the layout of a buffer of full chunk shape; beyond the tensor's edge is padding."""
    fragment = Fragment(
        name=name,
        global_shape=info.shape,
        box=box,
        offset=0,
        strides=row_major_strides(info.files.chunk_shape),
    )
    return TensorLayout(shape=info.files.chunk_shape, fragments=(fragment,))


def _boxes(tensors: Mapping[str, TensorInfo]) -> dict[Grid, list[Box]]:
    """Return the boxes of the chunks of every grid that occurs: there are few, of many tensors."""
    grids = {info.files for info in tensors.values()}
    return {grid: [grid.box(number) for number in range(grid.num_chunks)] for grid in grids}


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


def _assign(
    tensors: Mapping[str, TensorInfo],
    boxes: Mapping[Grid, Sequence[Box]],
    kinds: Sequence[Alike],
    num_ranks: int,
) -> list[Chunk]:
    """Give each chunk one writer: where most of it is, with no rank writing much more than others.

    First every chunk goes to the rank that holds most of it; of replicas, to the one with the least
    to write so far, large chunks first. Then ranks above the average hand chunks over, those first
    that they hold least of.
    """
    first: dict[str, int] = {}  # number of a tensor's first chunk among all chunks
    names: list[str] = []
    size: list[int] = []
    for name, info in tensors.items():
        first[name] = len(size)
        itemsize = stored_type(info.dtype).itemsize
        for box in boxes[info.files]:
            names.append(name)
            size.append(box.numel * itemsize)
    held = _held_elements(tensors, first, len(size), kinds)
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
    return [Chunk(name, i - first[name], writer[i]) for i, name in enumerate(names)]


def _held_elements(
    tensors: Mapping[str, TensorInfo],
    first: Mapping[str, int],
    num_chunks: int,
    kinds: Sequence[Alike],
) -> list[dict[int, int]]:
    """Return, for each chunk, how many of its elements ranks of each kind hold."""
    elements: list[dict[int, int]] = [{} for _ in range(num_chunks)]
    grids = {name: info.files for name, info in tensors.items()}
    counted: dict[tuple[Grid, Box], list[tuple[int, int]]] = {}  # once for tensors cut alike
    for number_of_kind, kind in enumerate(kinds):
        for layout in kind.layouts.values():
            for part in layout.fragments:
                cut = (grids[part.name], part.box)
                counts = counted.get(cut)
                if counts is None:
                    counts = counted[cut] = list(_common_elements(*cut))
                begin = first[part.name]
                for number, count in counts:
                    holders = elements[begin + number]
                    holders[number_of_kind] = holders.get(number_of_kind, 0) + count
    return elements


def _common_elements(grid: Grid, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the chunks that share elements with a box, and how many."""
    for number in grid.overlapping(box):
        common = grid.box(number).intersect(box)
        assert common is not None
        yield number, common.numel


def _rounds(
    chunks: Sequence[Chunk],
    copies: Sequence[Copy],
    tensors: Mapping[str, TensorInfo],
    exchange_bytes: int,
) -> Iterator[Round]:
    staged: dict[int, int] = defaultdict(int)
    current: dict[int, int] = defaultdict(int)
    round_of: dict[str, int] = {}
    for chunk in chunks:
        size = tensors[chunk.name].file_bytes
        if staged[chunk.writer] and staged[chunk.writer] + size > exchange_bytes:
            current[chunk.writer] += 1
            staged[chunk.writer] = 0
        staged[chunk.writer] += size
        round_of[chunk.key] = current[chunk.writer]
    count = max(round_of.values(), default=-1) + 1
    chunks_by_round: list[list[Chunk]] = [[] for _ in range(count)]
    copies_by_round: list[list[Copy]] = [[] for _ in range(count)]
    for chunk in chunks:
        chunks_by_round[round_of[chunk.key]].append(chunk)
    for copy in copies:
        copies_by_round[round_of[copy.target.key]].append(copy)
    for some_chunks, some_copies in zip(chunks_by_round, copies_by_round, strict=True):
        yield Round(chunks=tuple(some_chunks), copies=tuple(some_copies))

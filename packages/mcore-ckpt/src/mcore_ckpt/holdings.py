"""Which kinds of ranks hold what of which tensor, worked out once for all tensors held alike.

A model has thousands of tensors and few ways in which they are cut: whatever follows from how a
tensor is cut and by which kinds of ranks is found for one of them and stands for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from mcore_ckpt.alike import Alike
from mcore_ckpt.dtypes import stored_type
from mcore_ckpt.manifest import TensorInfo
from mcore_parallel.layout import (
    Box,
    Fragment,
    TensorLayout,
    check_tiling,
    plan,
    row_major_strides,
)


class Part(NamedTuple):
    """A box of a tensor that ranks of the kind `kind` hold, wherever in a local tensor it begins.

    replicas: which of how many equal copies it is, on one of these ranks after the other.
    """

    kind: int
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    strides: tuple[int, ...]
    replicas: tuple[tuple[int, int], ...]

    def layout(self, name: str, replica: int = 0, count: int = 1) -> TensorLayout:
        """Return the layout of a local tensor that begins with this part of the tensor `name`."""
        fragment = Fragment(
            name=name,
            global_shape=self.global_shape,
            box=self.box,
            offset=0,
            strides=self.strides,
            replica=replica,
            num_replicas=count,
        )
        return TensorLayout(shape=(max(0, fragment.last + 1),), fragments=(fragment,))


class Origin(NamedTuple):
    """Where a piece of a file can be taken from: which of the parts, how far from its begin."""

    part: int
    kind: int
    distance: int
    strides: tuple[int, ...]


class Piece(NamedTuple):
    """A box of a file, where it lies in the file's buffer, and where it can be taken from."""

    box: Box
    numel: int
    offset: int
    strides: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """How some tensors are held: in equal parts by the same kinds of ranks. `name` is one's."""

    name: str
    info: TensorInfo
    parts: tuple[Part, ...]
    _pieces: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of the tensor's files."""
        return [self.info.files.box(number) for number in range(self.info.files.num_chunks)]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of the elements in each of the files."""
        itemsize = stored_type(self.info.dtype).itemsize
        return [box.numel * itemsize for box in self.boxes]

    @cached_property
    def file_bytes(self) -> int:
        """Bytes of a file in memory."""
        return self.info.file_bytes

    @cached_property
    def elements(self) -> list[dict[int, int]]:
        """How many elements of each file are held by ranks of which kind."""
        found: list[dict[int, int]] = [{} for _ in self.boxes]
        for part in self.parts:
            for number in self.info.files.overlapping(part.box):
                common = self.boxes[number].intersect(part.box)
                assert common is not None
                found[number][part.kind] = found[number].get(part.kind, 0) + common.numel
        return found

    def pieces(self, number: int, kind: int) -> list[Piece]:
        """Return what file `number` is put together from on a rank of the kind `kind`.

        As far as the rank holds it, from itself; the rest has all parts as origins that are equal.
        """
        found = self._pieces.get((number, kind))
        if found is None:
            found = self._pieces[number, kind] = self._find_pieces(number, kind)
        return found

    def _find_pieces(self, number: int, kind: int) -> list[Piece]:
        box = self.boxes[number]
        for i, part in enumerate(self.parts):
            if part.kind == kind and part.box.contains(box):
                strides = row_major_strides(self.info.files.chunk_shape)
                return [Piece(box, box.numel, 0, strides, (self._origin(i, box),))]
        sources: dict[int, dict[str, TensorLayout]] = defaultdict(dict)
        for i, part in enumerate(self.parts):
            sources[part.kind][str(i)] = part.layout(self.name)
        target = _buffer_layout(self.name, self.info, box)
        pieces = []
        for copy in plan(sources, {kind: {"": target}}):
            taken = int(copy.source.key)
            equal = (
                [taken]
                if copy.source.rank == kind
                else [i for i, part in enumerate(self.parts) if part.box == self.parts[taken].box]
            )
            pieces.append(
                Piece(
                    copy.box,
                    copy.numel,
                    copy.target.offset,
                    copy.target.strides,
                    tuple(self._origin(i, copy.box) for i in equal),
                )
            )
        return pieces

    def _origin(self, number: int, box: Box) -> Origin:
        part = self.parts[number]
        steps = zip(box.start, part.box.start, part.strides, strict=True)
        distance = sum((a - b) * stride for a, b, stride in steps)
        return Origin(number, part.kind, distance, part.strides)


class Tensor(NamedTuple):
    """How a tensor is held; the local key of each part of it, and where that begins there."""

    held: Held
    keys: Sequence[str]
    offsets: Sequence[int]


def find_holdings(
    kinds: Sequence[Alike], info_of: Callable[[str, tuple[int, ...]], TensorInfo]
) -> dict[str, Tensor]:
    """Return all tensors of these ranks, sorted by name.

    info_of: how a tensor of this dtype and shape will lie on disk.

    Raises:
        ValueError: ranks disagree on a tensor's dtype.
    """
    parts: list[Part] = []
    numbers: dict[str, list[int]] = defaultdict(list)  # of the parts of each tensor
    keys: dict[str, list[str]] = defaultdict(list)
    offsets: dict[str, list[int]] = defaultdict(list)
    for number, kind in enumerate(kinds):
        cuts = _parts_of(number, kind, parts)
        for key, cut, *names in kind.description["held"]:
            for name, (part, offset) in zip(names, cuts[cut], strict=True):
                numbers[name].append(part)
                keys[name].append(key)
                offsets[name].append(offset)
    infos: dict[tuple[str, tuple[int, ...]], TensorInfo] = {}
    held: dict[tuple[int, ...], Held] = {}
    found = {}
    for name in sorted(numbers):
        alike = tuple(numbers[name])
        if alike not in held:
            some = tuple([parts[i] for i in alike])
            _check_dtype(name, some, kinds)
            what = (some[0].dtype, some[0].global_shape)
            if what not in infos:
                infos[what] = info_of(*what)
            held[alike] = Held(name=name, info=infos[what], parts=some)
        found[name] = Tensor(held[alike], keys[name], offsets[name])
    return found


def _parts_of(number: int, kind: Alike, parts: list[Part]) -> list[list[tuple[int, int]]]:
    """Add the parts of a kind; return number and offset of those in each of its cuts."""
    known: dict[object, int] = {}
    found: list[list[tuple[int, int]]] = []
    for cut, (dtype, _, rows) in enumerate(kind.description["cuts"]):
        found.append([])
        for row, replicas in zip(rows, kind.replicas_of(cut), strict=True):
            global_shape, start, shape, offset, strides = row
            same = (dtype, *map(tuple, (global_shape, start, shape, strides)), replicas)
            if same not in known:
                known[same] = len(parts)
                box = Box(tuple(start), tuple(shape))
                parts.append(
                    Part(number, dtype, tuple(global_shape), box, tuple(strides), replicas)
                )
            found[-1].append((known[same], offset))
    return found


def _check_dtype(name: str, parts: Sequence[Part], kinds: Sequence[Alike]) -> None:
    for part in parts:
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"{name}: rank {kinds[parts[0].kind].ranks[0]} holds it as {parts[0].dtype}, "
                f"rank {kinds[part.kind].ranks[0]} as {part.dtype}"
            )


def check_holdings(tensors: Mapping[str, Tensor]) -> None:
    """Check that every tensor is tiled once per replica, as `check_tiling` does.

    Of tensors that are cut alike and held by ranks of the same kinds one is looked at.
    """
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    right: set[tuple[object, ...]] = set()
    for held in {id(tensor.held): tensor.held for tensor in tensors.values()}.values():
        cut = tuple(
            [
                (part.global_shape, part.box, numbers.setdefault(part.replicas, len(numbers)))
                for part in held.parts
            ]
        )
        if cut not in right:
            check_tiling(
                part.layout(held.name, replica, count)
                for part in held.parts
                for replica, count in part.replicas
            )
            right.add(cut)


def _buffer_layout(name: str, info: TensorInfo, box: Box) -> TensorLayout:
    """Return the layout of a buffer of a whole file; beyond the tensor's edge is padding."""
    shape = info.files.chunk_shape
    fragment = Fragment(
        name=name, global_shape=info.shape, box=box, offset=0, strides=row_major_strides(shape)
    )
    return TensorLayout(shape=shape, fragments=(fragment,))

"""Buckets: parameters, and their fp32 gradients, in flat buffers that are reduced as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mcore_parallel.data.partition import Partition, Placement
from mcore_parallel.group import Group
from mcore_parallel.layout import TensorLayout
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.spec import GradSync, ParamSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One parameter and where it lies in its bucket.

    name: its local name. index: its place in the order of registration. offset: its first element.
    partial: ranges of the gradient to be summed over (parts of) the tensor-parallel group before
    the bucket is reduced. tied: ranges to be summed over other groups, after it.
    """

    name: str
    index: int
    param: nn.Parameter
    spec: ParamSpec
    offset: int
    partial: tuple[GradSync, ...]
    tied: tuple[GradSync, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param.numel()

    @property
    def stop(self) -> int:
        """One past its last element in the bucket."""
        return self.offset + self.numel

    def range_of(self, sync: GradSync) -> tuple[int, int]:
        """Return the range of the bucket that `sync` names."""
        stop = self.numel if sync.stop is None else sync.stop
        return self.offset + sync.start, self.offset + stop


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The part of a parameter that lies in this rank's shard.

    start, stop: the range of the flattened parameter. at: where it starts in the bucket.
    layout: of that 1-D range, with every replica counted, those of data parallelism too.
    """

    slot: Slot
    start: int
    stop: int
    at: int
    layout: TensorLayout

    @property
    def end(self) -> int:
        """One past its last element in the bucket."""
        return self.at + self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return self.stop - self.start == self.slot.numel


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are reduced over one group as one buffer.

    grads: gradients in fp32 (fp64 for fp64 parameters), of which only the own shard is meaningful
    after the reduction. values: the parameters, which are views of it. sharded: whether each rank
    of `group` owns one shard (else every rank owns all). deferred: whether it waits for other sums
    until the end of the backward pass.
    """

    slots: tuple[Slot, ...]
    group: Group
    sharded: bool
    deferred: bool
    placement: Placement
    grads: Tensor
    values: Tensor
    pieces: tuple[Piece, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(self._pieces()))

    @property
    def owned(self) -> tuple[int, int]:
        """The range of the bucket that this rank owns."""
        shard = self.placement.shard_numel
        start = shard * self.group.rank if self.sharded else 0
        return start, start + shard

    @property
    def owned_grads(self) -> Tensor:
        """This rank's shard of the gradients (a view)."""
        start, stop = self.owned
        return self.grads[start:stop]

    @property
    def owned_values(self) -> Tensor:
        """This rank's shard of the parameters (a view)."""
        start, stop = self.owned
        return self.values[start:stop]

    def _pieces(self) -> Iterator[Piece]:
        first, last = self.owned
        for slot in self.slots:
            start, stop = max(slot.offset, first), min(slot.stop, last)
            if start >= stop:
                continue
            a, b = start - slot.offset, stop - slot.offset
            layout = slot.spec.layout
            if not self.sharded:
                layout = layout.replicated(self.group.rank, self.group.size)
            yield Piece(slot=slot, start=a, stop=b, at=start, layout=layout.flat_range(a, b))


def make_buckets(
    params: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParamSpec],
    mesh: ParallelMesh,
    partition: Partition,
) -> list[Bucket]:
    """Move parameters into buckets, in reverse order of registration, and return these.

    A bucket takes parameters of one kind (dense or expert, dtype, sums to wait for or not) until it
    has `mesh.config.bucket_size` elements. The order of the list is that in which gradients are
    expected to be complete; it is the same on every rank that reduces with this one. Deferred
    buckets come last. A tied parameter has a bucket of its own, so that its copies lie in equal
    buckets and stay equal bit by bit.
    """
    kinds: dict[object, list[Slot]] = {}
    closed: list[list[Slot]] = []
    for index, name in reversed(list(enumerate(params))):
        param, spec = params[name], specs[name]
        partial, tied = _syncs(spec, mesh)
        slot = Slot(
            name=name, index=index, param=param, spec=spec, offset=0, partial=partial, tied=tied
        )
        alone = name if tied else None
        kind = (spec.expert, param.dtype, param.device, bool(partial), alone)
        members = kinds.setdefault(kind, [])
        members.append(slot)
        if sum(member.numel for member in members) >= mesh.config.bucket_size:
            closed.append(kinds.pop(kind))
    closed += kinds.values()
    closed.sort(key=lambda slots: (_is_deferred(slots[0]), -slots[-1].index))
    return [_make_bucket(slots, mesh, partition) for slots in closed]


def reduction_group(spec: ParamSpec, mesh: ParallelMesh) -> Group:
    """Return the group over which the gradient of such a parameter is summed."""
    return mesh.edp if spec.expert else mesh.dp_cp


def _syncs(
    spec: ParamSpec, mesh: ParallelMesh
) -> tuple[tuple[GradSync, ...], tuple[GradSync, ...]]:
    syncs = [sync for sync in spec.grad_sync if sync.group.size > 1]
    within = [set(sync.group.ranks) <= {*mesh.tp.ranks, *mesh.etp.ranks} for sync in syncs]
    partial = tuple(sync for sync, inside in zip(syncs, within, strict=True) if inside)
    tied = tuple(sync for sync, inside in zip(syncs, within, strict=True) if not inside)
    return partial, tied


def _is_deferred(slot: Slot) -> bool:
    return bool(slot.partial or slot.tied)


def _make_bucket(slots: list[Slot], mesh: ParallelMesh, partition: Partition) -> Bucket:
    first = slots[0]
    group = reduction_group(first.spec, mesh)
    sharded = mesh.config.sharding != "none" and group.size > 1
    num_shards = group.size if sharded else 1
    placement = partition([slot.numel for slot in slots], num_shards)
    numel = placement.shard_numel * num_shards
    values = torch.zeros(numel, dtype=first.param.dtype, device=first.param.device)
    grads = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    placed = []
    for slot, offset in zip(slots, placement.offsets, strict=True):
        within, shape = slice(offset, offset + slot.numel), slot.param.shape
        with torch.no_grad():
            values[within] = slot.param.flatten()
        slot.param.data = values[within].view(shape)
        # Layers that compute weight gradients themselves add them here.
        slot.param.main_grad = grads[within].view(shape)  # type: ignore[attr-defined]
        slot.param.grad_added_to_main = False  # type: ignore[attr-defined]
        placed.append(replace(slot, offset=offset))
    return Bucket(
        slots=tuple(placed),
        group=group,
        sharded=sharded,
        deferred=_is_deferred(first),
        placement=placement,
        grads=grads,
        values=values,
    )

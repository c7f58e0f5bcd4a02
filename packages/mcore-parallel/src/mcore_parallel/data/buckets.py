"""Buckets: parameters, and their fp32 gradients, in flat buffers that are reduced as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from mcore_parallel.collectives import Work, all_gather_into
from mcore_parallel.data.main_grad import MainGrad
from mcore_parallel.data.partition import Partition, Placement
from mcore_parallel.data.share import Piece, Slot, sharding_groups, split_syncs
from mcore_parallel.group import Group
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.spec import ParamSpec


class GradientBuffer:
    """The gradients of one bucket: all of them while they are accumulated, and this rank's share.

    make: returns that many zeros. numel: of the whole; `owned` is the share of it, `places` are
    those of the parameters. With `kept` the share is a part of the whole, which is always there;
    zeroing it marks its places as blank, and the first gradient of each overwrites what it has.
    Otherwise the whole has memory only from the first gradient that is added to it until it has
    been reduced (`take`), and the share is a buffer of its own.
    """

    def __init__(
        self,
        make: Callable[[int], Tensor],
        numel: int,
        owned: slice,
        *,
        places: Sequence[slice],
        kept: bool,
    ) -> None:
        self._make, self._numel, self.kept = make, numel, kept
        self._places, self._blank = tuple(places), set[int]()
        self._whole = make(numel) if kept else None
        if self._whole is None:
            self.share = make(owned.stop - owned.start)
        else:
            self.share = self._whole[owned]

    def place(self, index: int) -> tuple[Tensor, bool]:
        """Return where a parameter's gradient lies, and whether it is to be written over.

        It counts as written from then on.
        """
        blank = index in self._blank
        self._blank.discard(index)
        return self._memory()[self._places[index]], blank

    def whole(self) -> Tensor:
        """Return the gradients of the whole bucket; zero where there were none yet."""
        whole = self._memory()
        for index in self._blank:
            whole[self._places[index]].zero_()
        self._blank.clear()
        return whole

    def take(self) -> Tensor:
        """Return the whole; unless it is kept, the next gradients go into a new one."""
        whole = self.whole()
        if not self.kept:
            self._whole = None
        return whole

    def zero(self) -> None:
        """Set everything to zero, or forget it."""
        if self.kept:
            self._blank.update(range(len(self._places)))
        else:
            self._whole = None
            self.share.zero_()

    def _memory(self) -> Tensor:
        if self._whole is None:
            self._whole = self._make(self._numel)
        return self._whole


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parameters of one dtype whose gradients are reduced as one buffer. A `Share`.

    shard: the ranks each of which owns one shard; size 1: this one owns all. copies: the ranks that
    own the same. gradients: in fp32 (fp64 for fp64 parameters). values: the parameters, which are
    views of it. deferred: whether it waits for other sums until the end of the backward pass.
    """

    slots: tuple[Slot, ...]
    shard: Group
    copies: Group
    deferred: bool
    placement: Placement
    gradients: GradientBuffer
    values: Tensor
    pieces: tuple[Piece, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(self._pieces()))

    @property
    def owned(self) -> tuple[int, int]:
        """The range of the bucket that this rank owns."""
        return _owned(self.placement, self.shard)

    @property
    def keeps_shape(self) -> bool:
        """Whether no parameter is cut by a shard's border."""
        return self.placement.keeps_shape

    @property
    def owned_grads(self) -> Tensor:
        """This rank's shard of the gradients (a view)."""
        return self.gradients.share

    @property
    def owned_values(self) -> Tensor:
        """This rank's shard of the parameters (a view)."""
        start, stop = self.owned
        return self.values[start:stop]

    def gather(self) -> Work | None:
        """Start gathering the shards of the parameters, over `shard`."""
        if self.shard.size == 1:
            return None
        return all_gather_into(self.values, self.owned_values, self.shard)

    def _pieces(self) -> Iterator[Piece]:
        first, last = self.owned
        for slot in self.slots:
            start, stop = max(slot.offset, first), min(slot.stop, last)
            if start >= stop:
                continue
            a, b = start - slot.offset, stop - slot.offset
            layout = slot.spec.layout.replicated(self.copies.rank, self.copies.size)
            yield Piece(slot=slot, start=a, stop=b, at=start, layout=layout.flat_range(a, b))


def make_buckets(
    params: Mapping[str, nn.Parameter],
    specs: Mapping[str, ParamSpec],
    mesh: ParallelMesh,
    partition: Partition,
    *,
    order: Sequence[str],
) -> list[Bucket]:
    """Move parameters into buckets, in reverse order of registration, and return these.

    order: the names of all parameters, in order of registration.

    A bucket takes parameters of one kind (dense or expert, dtype, sums to wait for or not) until it
    has `mesh.config.bucket_size` elements. The order of the list is that in which gradients are
    expected to be complete; it is the same on every rank that reduces with this one. Deferred
    buckets come last. A tied parameter has a bucket of its own, so that its copies lie in equal
    buckets and stay equal bit by bit.
    """
    kinds: dict[object, list[Slot]] = {}
    closed: list[list[Slot]] = []
    for index, name in reversed(list(enumerate(order))):
        if name not in params:
            continue
        param, spec = params[name], specs[name]
        partial, tied = split_syncs(spec, mesh)
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


def _is_deferred(slot: Slot) -> bool:
    return bool(slot.partial or slot.tied)


def _owned(placement: Placement, shard: Group) -> tuple[int, int]:
    start = placement.shard_numel * shard.rank
    return start, start + placement.shard_numel


def _make_bucket(slots: list[Slot], mesh: ParallelMesh, partition: Partition) -> Bucket:
    first = slots[0]
    shard, copies = sharding_groups(first.spec, mesh)
    placement = partition([slot.numel for slot in slots], shard.size)
    numel = placement.shard_numel * shard.size
    values = torch.zeros(numel, dtype=first.param.dtype, device=first.param.device)
    deferred = _is_deferred(first)
    dtype = torch.promote_types(values.dtype, torch.float32)
    starts = zip(slots, placement.offsets, strict=True)
    places = [slice(offset, offset + slot.numel) for slot, offset in starts]
    gradients = GradientBuffer(
        partial(torch.zeros, dtype=dtype, device=values.device),
        numel,
        slice(*_owned(placement, shard)),
        places=places,
        # What waits for other sums is summed once, at the end.
        kept=deferred or mesh.config.sharding in ("none", "optimizer"),
    )
    placed = []
    for index, (slot, within) in enumerate(zip(slots, places, strict=True)):
        shape = slot.param.shape
        with torch.no_grad():
            values[within] = slot.param.flatten()
        slot.param.data = values[within].view(shape)
        # Layers that compute weight gradients themselves add them here.
        slot.param.main_grad = MainGrad(gradients, index, shape)  # type: ignore[attr-defined]
        slot.param.grad_added_to_main = False  # type: ignore[attr-defined]
        placed.append(replace(slot, offset=within.start))
    return Bucket(
        slots=tuple(placed),
        shard=shard,
        copies=copies,
        deferred=deferred,
        placement=placement,
        gradients=gradients,
        values=values,
    )

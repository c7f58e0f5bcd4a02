"""What a rank owns of some parameters, however they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from mcore_parallel.collectives import Work
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


class Share(Protocol):
    """What this rank owns of some parameters: their masters, and the sum of their gradients.

    owned: the range of some flat buffer; `pieces` say which parameters lie where in it.
    keeps_shape: every piece is a whole parameter, and update rules see it in its own shape.
    owned_grads, owned_values: 1-D, as long as `owned`; the former in fp32 (fp64), the latter in
    the dtype in which values are stored.
    """

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The parameters."""
        ...

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts of them that are owned."""
        ...

    @property
    def owned(self) -> tuple[int, int]:
        """First element, and one past the last, of what is owned."""
        ...

    @property
    def keeps_shape(self) -> bool:
        """Whether no parameter is cut."""
        ...

    @property
    def owned_grads(self) -> Tensor:
        """Their gradients."""
        ...

    @property
    def owned_values(self) -> Tensor:
        """Their values."""
        ...

    def gather(self) -> Work | None:
        """Start to give every rank the values that the others own; None: nobody needs them now."""
        ...


def grads_of(share: Share, start: int, stop: int) -> Tensor:
    """Return the part of `share.owned_grads` for the range `[start, stop)`, which may leave it."""
    first, last = share.owned
    start, stop = max(start, first), min(stop, last)
    return share.owned_grads[start - first : max(start, stop) - first]


def reduction_group(spec: ParamSpec, mesh: ParallelMesh) -> Group:
    """Return the group over which the gradient of such a parameter is summed."""
    return mesh.edp if spec.expert else mesh.dp_cp


def sharding_groups(spec: ParamSpec, mesh: ParallelMesh) -> tuple[Group, Group]:
    """Return `reduction_group` as the ranks that own a share each times those that own the same."""
    if mesh.config.sharding == "none":
        group = reduction_group(spec, mesh)
        return Group.single(group.ranks[group.rank]), group
    if spec.expert:
        return mesh.edp_shard, mesh.edp_copies
    return mesh.dp_shard, mesh.dp_copies


def split_syncs(
    spec: ParamSpec, mesh: ParallelMesh
) -> tuple[tuple[GradSync, ...], tuple[GradSync, ...]]:
    """Return the sums to make over (parts of) the tensor-parallel group, and all others."""
    syncs = [sync for sync in spec.grad_sync if sync.group.size > 1]
    within = [set(sync.group.ranks) <= {*mesh.tp.ranks, *mesh.etp.ranks} for sync in syncs]
    partial = tuple(sync for sync, inside in zip(syncs, within, strict=True) if inside)
    tied = tuple(sync for sync, inside in zip(syncs, within, strict=True) if not inside)
    return partial, tied

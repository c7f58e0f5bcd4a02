"""A `Group`: some ranks that communicate, as a value that a layer is given."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mcore_parallel import _torch
from mcore_parallel._failure import is_lost


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other, seen from one of them.

    A group of size 1 needs no torch.distributed and its collectives are the identity. A larger
    group whose `pg` is None is arithmetic only: it knows its ranks; collectives over it raise.
    Two groups are equal only when they are the same object. A copy (also a deep one) is the group
    itself, so that modules which hold groups can be copied.

    rank: my rank within the group. size: number of ranks. ranks: their torch.distributed ranks in
    group order. pg: the process group. name: for messages. timeout: of the groups derived from it.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    pg: dist.ProcessGroup | None = None
    name: str = ""
    timeout: datetime.timedelta | None = None
    owned: bool = field(default=False, repr=False)
    _children: dict[str, Group] = field(default_factory=dict, init=False, repr=False)
    _endings: list[Callable[[], None]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.ranks) != self.size or not 0 <= self.rank < self.size:
            raise ValueError(
                f"group {self.name!r}: rank {self.rank} of size {self.size} does not fit "
                f"{len(self.ranks)} ranks"
            )

    @staticmethod
    def single(rank: int = 0, name: str = "") -> Group:
        """Return the group of one torch.distributed rank, without processes."""
        return Group(0, 1, (rank,), None, name)

    @staticmethod
    def world(name: str = "world") -> Group:
        """Return all ranks of torch.distributed, or the single group when it is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return Group.single(0, name)
        size = dist.get_world_size()
        if size == 1:
            return Group.single(0, name)
        return Group(dist.get_rank(), size, tuple(range(size)), dist.group.WORLD, name)

    @staticmethod
    def create(
        ranks: Sequence[int],
        *,
        name: str = "group",
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> Group:
        """Return a new group over these torch.distributed ranks, in this order.

        Every member calls it, and nobody else; two groups of the same members are made in the same
        order everywhere. `backend` defaults to the world's. `close()` destroys it. A single rank
        needs no torch.distributed. `CollectiveError` names the members that do not come in time.
        """
        ranks = tuple(ranks)
        if len(ranks) == 1:
            return Group.single(ranks[0], name)
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"group {name!r} of {len(ranks)} ranks needs torch.distributed: call "
                f"mcore_parallel.init_from_env() or torch.distributed.init_process_group() first"
            )
        try:
            pg = _torch.new_process_group(
                ranks, name, backend=backend or dist.get_backend(), timeout=timeout
            )
        except RuntimeError as error:
            from mcore_parallel.faults import not_made  # which knows groups

            if not is_lost(error):
                raise
            raise not_made(name, ranks, dist.get_rank(), error) from error
        rank = ranks.index(dist.get_rank())
        return Group(rank, len(ranks), ranks, pg, name, timeout, owned=True)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group to communicate over; ValueError when there is none (any more)."""
        if self.pg is None:
            raise ValueError(
                f"group {self.name!r} of {self.size} ranks is arithmetic only and cannot "
                f"communicate: make its mesh with ParallelMesh.create"
            )
        if not _torch.is_alive(self.pg):
            raise ValueError(f"group {self.name!r} of ranks {list(self.ranks)} has been closed")
        return self.pg

    @property
    def cpu(self) -> Group:
        """The same ranks over gloo, for CPU tensors and objects; itself if it can do that already.

        Built at the first use, by all members together.
        """
        if self.pg is None or _torch.has_cpu_backend(self.process_group):
            return self
        if "cpu" not in self._children:
            self._children["cpu"] = Group.create(
                self.ranks, name=f"{self.name}.cpu", backend="gloo", timeout=self.timeout
            )
        return self._children["cpu"]

    def split(self, size: int) -> Group:
        """Return my part when the group is cut into parts of `size` consecutive members.

        Built at the first use, by all members of the part together, then kept. ValueError when
        `size` does not divide the group's.
        """
        if size < 1 or self.size % size:
            divisors = [d for d in range(1, self.size + 1) if self.size % d == 0]
            raise ValueError(
                f"group {self.name!r} of {self.size} ranks cannot be split into parts of {size}: "
                f"valid sizes are {', '.join(map(str, divisors))}"
            )
        if size == self.size:
            return self
        start = self.rank // size * size
        ranks = self.ranks[start : start + size]
        name = f"{self.name}/{size}"
        if size == 1:
            return Group.single(ranks[0], name)
        if self.pg is None:
            return Group(self.rank - start, size, ranks, None, name)
        key = f"split {size}"
        if key not in self._children:
            backend = _torch.backend_of(self.process_group)
            self._children[key] = Group.create(
                ranks, name=name, backend=backend, timeout=self.timeout
            )
        return self._children[key]

    def when_closed(self, ending: Callable[[], None]) -> None:
        """Call `ending` when this group is closed: it lets go of the process group, too.

        The connections of a process group, and gloo's threads, last as long as any reference to it.
        """
        self._endings.append(ending)

    def close(self) -> None:
        """Destroy the process groups that this group made: its twin, its parts, and its own.

        The members call it together; a second call does nothing.
        """
        for child in self._children.values():
            child.close()
        self._children.clear()
        for ending in self._endings:
            ending()
        self._endings.clear()
        if self.owned and self.pg is not None and _torch.is_alive(self.pg):
            dist.destroy_process_group(self.pg)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.pg is not None:
            raise TypeError(
                f"group {self.name!r} holds a process group of this process and cannot be pickled"
            )
        return (Group, (self.rank, self.size, self.ranks, None, self.name, self.timeout))

"""The dispatchers by name: those of this package, and those that others register.

Importing this needs no torch, so that a configuration can be checked without it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_parallel.expert.dispatch import Dispatcher, DispatcherFactory
    from mcore_parallel.expert.permute import PermuteOp
    from mcore_parallel.group import Group

__all__ = [
    "DISPATCHERS",
    "ENTRY_POINTS",
    "check_dispatcher",
    "check_overlap",
    "dispatcher_factory",
    "make_dispatcher",
]

DISPATCHERS = ("all-to-all", "all-gather")
"""The dispatchers of this package."""

ENTRY_POINTS = "mcore_parallel.dispatchers"
"""The group of entry points in which packages register a `DispatcherFactory` under a name."""


def check_dispatcher(name: str) -> None:
    """Raise ValueError unless there is a dispatcher of this name, here or in a package installed.

    Whether it can work here it says itself when it is made.
    """
    if name not in DISPATCHERS:
        _registered(name)


def check_lanes(lanes: int, sequence_is_cut: bool, sharding: str) -> None:
    """Raise ValueError where a micro-batch cannot go through the layers in several lanes."""
    if lanes > 1 and sequence_is_cut:
        raise ValueError(
            f"lanes = {lanes} with sequence parallelism, which cuts a micro-batch across its "
            f"documents: use lanes = 1, or leave out sp"
        )
    if lanes > 1 and sharding == "parameters":
        raise ValueError(
            f"lanes = {lanes} with sharding parameters, which are whole only while a layer runs "
            f"alone: use lanes = 1, or sharding gradients"
        )


def check_overlap(*, ep: int, lanes: int, overlap: bool, sharding: str) -> None:
    """Raise ValueError where tokens cannot travel while another micro-batch is computed."""
    what = "overlap_expert_exchange"
    if ep == 1:
        raise ValueError(f"{what} with ep = 1, where no tokens travel: use ep ≥ 2, or leave it out")
    if not overlap:
        raise ValueError(f"{what} with overlap = 0, which waits at once: use overlap = 1")
    if lanes > 1:
        raise ValueError(
            f"{what} with lanes = {lanes}, parts of one micro-batch in the place of two "
            f"micro-batches: use lanes = 1, or leave {what} out"
        )
    if sharding == "parameters":
        raise ValueError(
            f"{what} with sharding parameters, which are whole only while a layer runs alone: use "
            f"sharding gradients, or leave it out"
        )


def dispatcher_factory(name: str) -> DispatcherFactory:
    """Return the maker of the dispatchers of this name.

    Raises:
        ValueError: nobody has registered the name, or what registered it cannot be imported.
    """
    if name not in DISPATCHERS:
        entry = _registered(name)
        try:
            found: DispatcherFactory = entry.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"dispatcher {name!r} is registered as {entry.value}, which cannot be imported: "
                f"{error}"
            ) from error
        return found
    if name == "all-gather":
        from mcore_parallel.expert.all_gather import AllGather

        return AllGather
    from mcore_parallel.expert.all_to_all import AllToAll

    return AllToAll


def make_dispatcher(
    name: str,
    num_experts: int,
    *,
    ep: Group,
    etp: Group,
    permute: PermuteOp | None = None,
    overlap: bool = True,
    drops: bool = True,
) -> Dispatcher:
    """Return a dispatcher by name; arguments as in `DispatcherFactory`.

    drops: whether a choice may be -1. Where none is, and all experts are whole on this rank, the
    names of this package stand for `Local`, by which no count is read on the host.

    Raises:
        ValueError: there is none of this name, or it refuses.
    """
    from mcore_parallel.expert.permute import TorchPermute

    factory = dispatcher_factory(name)
    if name in DISPATCHERS and ep.size * etp.size == 1 and not drops:
        from mcore_parallel.expert.local import Local

        factory = Local
    op = permute or TorchPermute()
    return factory(num_experts, ep=ep, etp=etp, permute=op, overlap=overlap)


def _registered(name: str) -> EntryPoint:
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name in found:
        return found[name]
    known = ", ".join((*DISPATCHERS, *sorted(found)))
    raise ValueError(
        f"no dispatcher {name!r}: there are {known}; packages add theirs as entry points of the "
        f"group {ENTRY_POINTS}"
    )

"""The one place that knows what torch.distributed calls things, and in which release.

torch 2.12 and later rename `all_gather_into_tensor` and `reduce_scatter_tensor` to `*_single` and
warn about the old names; making a process group under a name of our own needs a private helper.
Everything else in the package uses the functions below.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# What every backend moves as it is; anything else (fp8, unsigned) travels as its bytes.
_PLAIN = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the contiguous `x` in a dtype that every backend can move."""
    flat = x.view(-1)
    return flat if x.dtype in _PLAIN else flat.view(torch.uint8)


def all_gather_into(
    out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup, *, async_op: bool = False
) -> Any:
    """Gather every rank's `x` one after another into `out` (size · x.numel() elements)."""
    return _all_gather(bits(out), bits(x), group=pg, async_op=async_op)


def reduce_scatter_into(
    out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup, *, async_op: bool = False
) -> Any:
    """Sum `x` over the ranks and leave slice number `rank` of the sum in `out`."""
    return _reduce_scatter(out.view(-1), x.view(-1), group=pg, async_op=async_op)


def all_to_all_into(
    out: torch.Tensor,
    x: torch.Tensor,
    out_counts: Sequence[int],
    in_counts: Sequence[int],
    pg: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> Any:
    """Send `in_counts[r]` elements of `x` to each rank r, receive `out_counts[r]` into `out`."""
    sent, received = bits(x), bits(out)
    scale = 1 if x.dtype in _PLAIN else x.element_size()
    splits = [n * scale for n in out_counts], [n * scale for n in in_counts]
    return dist.all_to_all_single(received, sent, *splits, group=pg, async_op=async_op)


def new_process_group(
    ranks: Sequence[int],
    label: str,
    *,
    backend: str,
    timeout: datetime.timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a process group over the global `ranks`; called by its members only, in any world.

    `torch.distributed.new_group` names a group either by a counter that every rank of the world has
    to advance together, or (local synchronisation) by its ranks and the number of groups that the
    calling process happens to hold. The latter differs between pipeline stages, so members wait for
    each other under different names, and repeats after a group is destroyed, so that they read the
    addresses of the dead one. Here the name is (ranks, label, how many such groups these members
    have made before), counted in the world's own store: members agree by construction.
    """
    default: Any = c10d._get_default_group()
    store: Any = c10d._get_default_store()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    bad = [r for r in ranks if not 0 <= r < world_size]
    if bad:
        raise ValueError(f"group {label!r}: ranks {bad} are not in a world of {world_size} ranks")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"group {label!r}: ranks {list(ranks)} name a rank twice")
    if rank not in ranks:
        raise ValueError(f"group {label!r}: rank {rank} is not one of its ranks {list(ranks)}")
    members = "_".join(map(str, ranks))
    withdraw_fault()
    generation = store.add(_made_key(label, ranks, rank), 1)
    helper: Any = c10d._new_process_group_helper
    with _without_bound_device(default):
        pg, _ = helper(
            len(ranks),
            list(ranks).index(rank),
            list(ranks),
            backend=dist.Backend(backend),
            store=store,
            group_name=f"mcore/{label}/{members}/{generation}",
            timeout=timeout or _default_timeout(backend),
            group_desc=label,
        )
    world: Any = c10d._world
    world.pg_group_ranks[pg] = {r: i for i, r in enumerate(ranks)}
    if has_cpu_backend(pg):
        # A member that is connected may close the group, to which another still connects.
        pg._get_backend(torch.device("cpu")).barrier().wait()
    return pg  # type: ignore[no-any-return]


def who_has_not_come(ranks: Sequence[int], label: str) -> list[int]:
    """Return the ranks that have not begun to make the group that this rank makes."""
    store: Any = c10d._get_default_store()
    begun = {rank: store.add(_made_key(label, ranks, rank), 0) for rank in ranks}
    return [rank for rank in ranks if begun[rank] < begun[dist.get_rank()]]


def _made_key(label: str, ranks: Sequence[int], rank: int) -> str:
    """Under what a rank counts, in the store of the world, how often it has made such a group."""
    return f"mcore/{label}/{'_'.join(map(str, ranks))}/{rank}"


@contextmanager
def _without_bound_device(default: Any) -> Iterator[None]:
    # With a bound device torch splits the world's NCCL communicator, a collective call over the
    # whole world; ours are made by their members alone, when they are first used.
    device = default.bound_device_id
    if device is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def _default_timeout(backend: str) -> datetime.timedelta:
    """The world's own timeout where it has this backend, else torch's."""
    world: Any = c10d._get_default_group()
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    if backend == dist.get_backend():
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    timeout = c10d._get_default_timeout(dist.Backend(backend))
    return timeout


def send(x: torch.Tensor, dst: int, pg: dist.ProcessGroup) -> Any:
    """Start sending the contiguous `x` to the global rank `dst`."""
    return dist.isend(bits(x), dst=dst, group=pg)


def receive(out: torch.Tensor, src: int, pg: dist.ProcessGroup) -> Any:
    """Start receiving into the contiguous `out` what the global rank `src` sends."""
    return dist.irecv(bits(out), src=src, group=pg)


def has_cpu_backend(pg: dist.ProcessGroup) -> bool:
    """Whether `pg` moves CPU tensors (a gloo group, or a mixed one)."""
    return "cpu:" in dist.get_backend_config(pg)


def default_store() -> Any:
    """Return the store of the current world, through which its ranks found each other."""
    return c10d._get_default_store()


def fault_key(rank: int) -> str:
    """Under what a rank tells the others of a fault, in the store of the world."""
    return f"mcore/fault/{rank}"


def withdraw_fault() -> None:
    """Take back what this rank told of a fault: it makes groups anew, so that one is over.

    Nobody can be in a group with this rank before that, and read of the old fault in a new one.
    """
    store: Any = c10d._get_default_store()
    key = fault_key(dist.get_rank())
    if store.check([key]):
        store.delete_key(key)


def break_connections(pg: dist.ProcessGroup) -> None:
    """Close all connections of a gloo group.

    Waits on both sides then raise, those of other threads too. gloo offers no other way to end a
    wait than a timeout, after which it closes every connection of the group.
    """
    for peer in dist.get_process_group_ranks(pg):
        if peer == dist.get_rank():
            continue
        with contextlib.suppress(RuntimeError):  # raised where this connection is closed already
            # The tag is one that nobody uses and that belongs to the same connections as tag 0.
            work: Any = dist.irecv(torch.empty(1), src=peer, group=pg, tag=1 << 20)
            work.wait(datetime.timedelta(milliseconds=1))


def closed_peers(pg: dist.ProcessGroup) -> list[int]:
    """Return the ranks to which the connection of a gloo group is closed, from either side.

    To be followed by `break_connections`: what is sent to the others nobody receives.
    """
    closed = []
    for peer in dist.get_process_group_ranks(pg):
        if peer != dist.get_rank():
            try:
                # A tag besides that of `break_connections`, which must not receive this.
                dist.isend(torch.empty(1), dst=peer, group=pg, tag=1 << 21)
            except RuntimeError:
                closed.append(peer)
    return closed


def backend_of(pg: dist.ProcessGroup) -> str:
    """The backend string from which another group of the same kind is made."""
    return dist.get_backend(pg)


def is_alive(pg: dist.ProcessGroup) -> bool:
    """Whether `pg` still belongs to the current world."""
    world: Any = c10d._world
    return pg in world.pg_map


def forget_groups(mesh: Any) -> None:
    """Let a `DeviceMesh` of groups that are closed hold them no longer.

    torch keeps every mesh for ever: in what it remembers of operators on DTensors.
    """
    mesh._pg_registry.clear()


def file_store(path: str, world_size: int, *, prefix: str) -> Any:
    """Return a store over the file `path`, through which the ranks of one machine find each other.

    Every world uses its own prefix, so that what a dead one left behind is never read.
    """
    names: Any = dist  # the stores are missing from torch's type information
    return names.PrefixStore(prefix, names.FileStore(path, world_size))

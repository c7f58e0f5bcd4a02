"""Carry out copies between ranks: from the tensors of one set of layouts to those of another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_parallel._torch import has_cpu_backend
from mcore_parallel.collectives import all_gather_object, all_to_all
from mcore_parallel.group import Group
from mcore_parallel.layout.box import dot
from mcore_parallel.layout.layout import LayoutTensor, TensorLayout
from mcore_parallel.layout.plan import Copy, Place, plan

_ALIGN = 16  # bytes: every peer's part of a buffer starts where any dtype may


def transfer(
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: Group,
    *,
    max_bytes: int = 1 << 28,
) -> None:
    """Execute `copies`, writing `targets` in place; dtypes are converted where the ends differ.

    Every rank of `group` calls it with the same list (`plan` of the same layouts) and its own
    local tensors by key. What crosses ranks is packed into one byte buffer per peer, in the
    smaller dtype of the two ends, and exchanged by all-to-all in rounds in which no rank sends or
    receives more than `max_bytes` (one larger copy makes a round of its own). Copies within a rank
    touch no group. Sources and targets may not share storage.

    Raises:
        ValueError: a rank of the plan is not in the group; or a tensor that the plan needs is
            missing, not contiguous or too small on some rank (then on all ranks, naming the first).
    """
    remote = [copy for copy in copies if copy.source.rank != copy.target.rank]
    members = {rank: i for i, rank in enumerate(group.ranks)}
    for copy in copies:
        for rank in (copy.source.rank, copy.target.rank):
            if rank not in members:
                raise ValueError(f"{copy.name}: rank {rank} is not one of {list(group.ranks)}")
    me = group.ranks[group.rank]
    error = _first_error(copies, sources, targets, me)
    if remote:
        ends = _exchange_ends(remote, sources, targets, group, error)
    elif error:
        raise ValueError(error)
    with torch.no_grad():
        for copy in copies:
            if copy.source.rank == me == copy.target.rank:
                target = _view(targets, copy.target, copy.shape)
                target.copy_(_view(sources, copy.source, copy.shape))
        if remote:
            device = _wire_device(ends, group)
            for batch in _rounds(remote, ends, max_bytes):
                _exchange(batch, sources, targets, group, device)


def reshard(
    sources: Mapping[str, LayoutTensor], targets: Mapping[str, LayoutTensor], group: Group
) -> None:
    """Fill the targets of all ranks of `group` in place from the sources of all its ranks.

    Every rank passes its own; layouts are gathered over the group, then planned and transferred.
    """
    copies = plan(
        gather_layouts({key: x.layout for key, x in sources.items()}, group),
        gather_layouts({key: x.layout for key, x in targets.items()}, group),
    )
    transfer(
        copies,
        {key: x.tensor for key, x in sources.items()},
        {key: x.tensor for key, x in targets.items()},
        group,
    )


def gather_layouts(
    layouts: Mapping[str, TensorLayout], group: Group
) -> dict[int, dict[str, TensorLayout]]:
    """Return every rank's layouts by torch.distributed rank and key: the arguments of `plan`."""
    return dict(zip(group.ranks, all_gather_object(dict(layouts), group), strict=True))


def gather_global(
    tensor: torch.Tensor, layout: TensorLayout, group: Group
) -> dict[str, torch.Tensor]:
    """Return the whole global tensors that the ranks' local tensors hold parts of, by name.

    On the group's rank 0, on the CPU; the other ranks get an empty mapping. Every rank calls it.
    """
    return gather_all({"": LayoutTensor(tensor, layout)}, group)


def gather_all(tensors: Mapping[str, LayoutTensor], group: Group) -> dict[str, torch.Tensor]:
    """Return every global tensor held by `tensors` over the group, whole, by name.

    As `gather_global`, for many tensors in one plan.

    Raises:
        ValueError: ranks hold parts of one global tensor in different dtypes, or nobody holds some.
    """
    root = group.ranks[0]
    layouts = gather_layouts({key: x.layout for key, x in tensors.items()}, group)
    dtypes = all_gather_object({key: x.tensor.dtype for key, x in tensors.items()}, group)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, by_key in zip(group.ranks, dtypes, strict=True):
        for key, dtype in by_key.items():
            for f in layouts[rank][key].fragments:
                if found.setdefault(f.name, (f.global_shape, dtype))[1] != dtype:
                    raise ValueError(f"{f.name}: held as {found[f.name][1]} and as {dtype}")
    wholes = {name: TensorLayout.whole(name, shape) for name, (shape, _) in found.items()}
    copies = plan(layouts, {root: wholes})
    result: dict[str, torch.Tensor] = {}
    if group.rank == 0:
        result = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in found.items()}
    transfer(copies, {key: x.tensor for key, x in tensors.items()}, result, group)
    return result


def _view(tensors: Mapping[str, torch.Tensor], place: Place, shape: Sequence[int]) -> torch.Tensor:
    tensor = tensors[place.key].detach()
    return tensor.as_strided(shape, place.strides, int(tensor.storage_offset()) + place.offset)


def _first_error(
    copies: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    me: int,
) -> str | None:
    for copy in copies:
        for place, tensors in ((copy.source, sources), (copy.target, targets)):
            if place.rank != me:
                continue
            what = f"{copy.name}: rank {me}, local tensor {place.key!r}"
            if place.key not in tensors:
                return f"{what} is missing"
            tensor = tensors[place.key]
            last = place.offset + dot([n - 1 for n in copy.shape], place.strides)
            if not tensor.is_contiguous():
                return f"{what} is not contiguous (strides {tensor.stride()})"
            if last >= tensor.numel():
                return f"{what} of {tensor.numel()} elements has no element {last}"
    return None


@dataclass(frozen=True)
class _Ends:
    """What the other ranks of a transfer need to know of one rank before it starts."""

    error: str | None
    on_gpu: bool
    sources: dict[str, torch.dtype]
    targets: dict[str, torch.dtype]


def _exchange_ends(
    remote: Sequence[Copy],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: Group,
    error: str | None,
) -> dict[int, _Ends]:
    """Return every rank's dtypes; raise on all ranks together when one of them has an error."""
    me = group.ranks[group.rank]
    sent = {copy.source.key for copy in remote if copy.source.rank == me}
    received = {copy.target.key for copy in remote if copy.target.rank == me}
    sending = {key: sources[key] for key in sent if key in sources}
    receiving = {key: targets[key] for key in received if key in targets}
    mine = _Ends(
        error,
        all(x.is_cuda for x in (*sending.values(), *receiving.values())),
        {key: x.dtype for key, x in sending.items()},
        {key: x.dtype for key, x in receiving.items()},
    )
    ends = dict(zip(group.ranks, all_gather_object(mine, group), strict=True))
    errors = [end.error for end in ends.values() if end.error]
    if errors:
        raise ValueError(errors[0])
    return ends


def _wire_device(ends: Mapping[int, _Ends], group: Group) -> torch.device:
    """Return where buffers lie: the CPU where the group can, unless all tensors are on its GPUs."""
    config = dist.get_backend_config(group.process_group)
    on_gpu = "cuda:nccl" in config and all(end.on_gpu for end in ends.values())
    if has_cpu_backend(group.process_group) and not on_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A copy between ranks and the dtype in which it travels."""

    copy: Copy
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.copy.numel * self.dtype.itemsize


def _rounds(
    remote: Sequence[Copy], ends: Mapping[int, _Ends], max_bytes: int
) -> Iterator[list[_Parcel]]:
    """Cut the copies, in order, where some rank would send or receive more than `max_bytes`."""
    batch: list[_Parcel] = []
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for copy in remote:
        source = ends[copy.source.rank].sources[copy.source.key]
        target = ends[copy.target.rank].targets[copy.target.key]
        parcel = _Parcel(copy, target if target.itemsize < source.itemsize else source)
        busy = max(sent[copy.source.rank], received[copy.target.rank])
        if batch and busy + parcel.nbytes > max_bytes:
            yield batch
            batch = []
            sent.clear()
            received.clear()
        batch.append(parcel)
        sent[copy.source.rank] += parcel.nbytes
        received[copy.target.rank] += parcel.nbytes
    yield batch


def _exchange(
    batch: Sequence[_Parcel],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    group: Group,
    device: torch.device,
) -> None:
    me = group.ranks[group.rank]
    outgoing: dict[int, list[_Parcel]] = {rank: [] for rank in group.ranks}
    incoming: dict[int, list[_Parcel]] = {rank: [] for rank in group.ranks}
    for parcel in batch:
        if parcel.copy.source.rank == me:
            outgoing[parcel.copy.target.rank].append(parcel)
        if parcel.copy.target.rank == me:
            incoming[parcel.copy.source.rank].append(parcel)
    slots_out, sizes_out = _slots(list(outgoing.values()))
    slots_in, sizes_in = _slots(list(incoming.values()))
    buffer = torch.zeros(sum(sizes_out), dtype=torch.uint8, device=device)
    for parcel, start in slots_out:
        _slot(buffer, parcel, start).copy_(_view(sources, parcel.copy.source, parcel.copy.shape))
    buffer = all_to_all(buffer, group, sizes_in, sizes_out)
    for parcel, start in slots_in:
        target = _view(targets, parcel.copy.target, parcel.copy.shape)
        target.copy_(_slot(buffer, parcel, start))


def _slots(by_peer: Sequence[Sequence[_Parcel]]) -> tuple[list[tuple[_Parcel, int]], list[int]]:
    """Return where each parcel starts in a buffer of one part per peer, and the parts' sizes."""
    slots: list[tuple[_Parcel, int]] = []
    sizes: list[int] = []
    end = 0
    for parcels in by_peer:
        begin = end
        for parcel in parcels:
            start = _rounded(end, parcel.dtype.itemsize)
            slots.append((parcel, start))
            end = start + parcel.nbytes
        end = _rounded(end, _ALIGN)
        sizes.append(end - begin)
    return slots, sizes


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _slot(buffer: torch.Tensor, parcel: _Parcel, start: int) -> torch.Tensor:
    return buffer[start : start + parcel.nbytes].view(parcel.dtype).view(parcel.copy.shape)

"""Checks of the arguments of collectives, with the numbers in the message."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mcore_parallel.group import Group


def check_dim(x: Tensor, dim: int, what: str) -> int:
    """Return `dim` counted from the front; ValueError when `x` has no such dimension."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: a tensor of {x.dim()} dimensions has no dimension {dim}")
    return dim % x.dim()


def check_divisible(x: Tensor, dim: int, group: Group, what: str) -> int:
    """Return `dim` counted from the front; ValueError unless the ranks can share it equally."""
    dim = check_dim(x, dim, what)
    length, size = x.shape[dim], group.size
    if length % size:
        below = length // size * size
        near = f"{below} or {below + size}" if below else f"{size}"
        raise ValueError(
            f"{what}: dimension {dim} of shape {tuple(x.shape)} is {length}, which "
            f"{size} ranks of group {group.name!r} cannot share equally; valid are {near}"
        )
    return dim


def check_splits(
    splits: Sequence[int] | None, rows: int | None, group: Group, what: str
) -> list[int]:
    """Return the rows for each rank: `splits`, or equal parts of `rows`."""
    if splits is None:
        assert rows is not None
        if rows % group.size:
            raise ValueError(
                f"all_to_all: {rows} rows cannot be shared equally by {group.size} ranks of group "
                f"{group.name!r}; pass out_splits and in_splits"
            )
        return [rows // group.size] * group.size
    splits = list(splits)
    if len(splits) != group.size or min(splits) < 0:
        raise ValueError(
            f"all_to_all: {what} {splits} must be {group.size} numbers of rows, "
            f"one for each rank of group {group.name!r}"
        )
    if rows is not None and sum(splits) != rows:
        raise ValueError(f"all_to_all: {what} {splits} sum to {sum(splits)}, not to {rows} rows")
    return splits


def check_member(rank: int, group: Group, what: str) -> None:
    """Require a rank that counts within the group."""
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{what}: group {group.name!r} has ranks 0 to {group.size - 1}, not {rank}"
        )


def check_peer(rank: int, group: Group, what: str) -> None:
    """Require another rank of the group."""
    check_member(rank, group, what)
    if rank == group.rank:
        raise ValueError(f"{what}: rank {rank} of group {group.name!r} is myself")


def check_buffer(x: Tensor, what: str, name: str) -> None:
    """Require memory without gaps, so that its flat view is the buffer itself."""
    if not x.is_contiguous():
        raise ValueError(f"{what}: buffer {name} of shape {tuple(x.shape)} is not contiguous")


def check_buffers(out: Tensor, x: Tensor, group: Group, what: str, *, larger: Tensor) -> None:
    """Require contiguous buffers of one dtype, one of them `group.size` times the other's size."""
    check_buffer(out, what, "out")
    check_buffer(x, what, "x")
    if out.dtype != x.dtype:
        raise ValueError(f"{what}: buffers of different types, out {out.dtype} and x {x.dtype}")
    smaller = x if larger is out else out
    if larger.numel() != group.size * smaller.numel():
        raise ValueError(
            f"{what}: out has {out.numel()} elements and x {x.numel()}; over {group.size} ranks of "
            f"group {group.name!r} the larger must have {group.size} times as many as the smaller"
        )

"""How the bytes of a transfer between ranks travel: one interface, gloo and NCCL behind it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from mcore_ckpt.agreement import together
from mcore_parallel.collectives import all_to_all
from mcore_parallel.group import Group

GROUP = "mcore_ckpt.transports"
"""Entry-point group under which packages register a `TransportKind` by its name."""
_KNOWN = ("nixl", "nvshmem")  # by name, so that a message can say where they come from


@runtime_checkable
class Transport(Protocol):
    """Moves bytes between the ranks of one group.

    device: where buffers have to lie.
    """

    @property
    def device(self) -> torch.device:
        """Return the device of the buffers, the CPU or this rank's own."""

    def exchange(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send each member its part and return what came in, in group order.

        Every rank of the group calls it, in the same order of calls. `outgoing` is uint8 of one
        dimension; the next `send_sizes[i]` bytes of it are for member i, and `receive_sizes[i]`
        come from there; the two ends agree, any of them may be 0, and a rank sends itself nothing.
        `outgoing` is not changed, and may be written again when the call has returned.

        Raises:
            RuntimeError: the bytes could not be moved; no rank waits longer than the group's
                timeout.
        """

    def close(self) -> None:
        """Release what the transport holds; every rank calls it."""


class TransportKind(Protocol):
    """Opens transports of one kind, where it can: the object behind an entry point."""

    def refusal(self, group: Group) -> str | None:
        """Return why this rank cannot use it in `group` and what to do, None when it can."""

    def open(self, group: Group) -> Transport:
        """Return a transport over `group`; every rank calls it, and none has refused."""


class GroupTransport:
    """All-to-all over the process group of a `Group`: gloo on the CPU, NCCL on GPUs."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device

    @property
    def device(self) -> torch.device:
        """Return the device of the buffers."""
        return self._device

    def exchange(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send each member its part (see `Transport.exchange`)."""
        return all_to_all(outgoing, self._group, receive_sizes, send_sizes)

    def close(self) -> None:
        """Do nothing: the group belongs to whoever made it."""


class _Gloo:
    def refusal(self, group: Group) -> str | None:
        return None

    def open(self, group: Group) -> Transport:
        return GroupTransport(group.cpu, torch.device("cpu"))


class _NCCL:
    def refusal(self, group: Group) -> str | None:
        if not torch.cuda.is_available():
            return "it needs a CUDA device, and this process sees none: use gloo"
        if group.size > 1 and "cuda:nccl" not in dist.get_backend_config(group.process_group):
            return "the group was made without NCCL: make it with backend 'nccl', or use gloo"
        return None

    def open(self, group: Group) -> Transport:
        return GroupTransport(group, torch.device("cuda", torch.cuda.current_device()))


BUILT_IN: Mapping[str, TransportKind] = {"gloo": _Gloo(), "nccl": _NCCL()}


def open_transport(name: str, group: Group) -> Transport:
    """Return a transport over `group` by its name: gloo, nccl, or one that a package registers.

    Every rank of the group calls it, with the same name.

    Raises:
        ValueError: on every rank: there is none of that name, or it refuses on some rank; says why
            and what to use.
    """
    found: list[TransportKind] = []

    def look() -> str:
        found.append(_find(name))
        refusal = found[0].refusal(group)
        if refusal is not None:
            raise ValueError(f"transport {name!r} cannot be used: {refusal}")
        return name

    names = together(group.cpu, "opening a transport failed", look)
    if len(set(names)) > 1:
        raise ValueError(f"the ranks ask for different transports: {', '.join(sorted(set(names)))}")
    return found[0].open(group)


def pick_transport(group: Group, *, on_gpu: bool) -> str:
    """Return the transport for tensors that lie where they do; every rank calls it.

    on_gpu: whether all tensors of this rank are on its GPU.
    """
    possible = together(
        group.cpu,
        "choosing a transport failed",
        lambda: on_gpu and BUILT_IN["nccl"].refusal(group) is None,
    )
    return "nccl" if all(possible) else "gloo"


def _find(name: str) -> TransportKind:
    if name in BUILT_IN:
        return BUILT_IN[name]
    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in registered:
        kind: TransportKind = registered[name].load()
        return kind
    here = sorted({*BUILT_IN, *registered})
    if name in _KNOWN:
        raise ValueError(
            f"transport {name!r} is not installed: it comes from a package that registers it under "
            f"the entry-point group {GROUP}; here are {', '.join(here)}"
        )
    nearest = difflib.get_close_matches(name, [*here, *_KNOWN], n=1, cutoff=0.0)[0]
    raise ValueError(f"no transport {name!r}; here are {', '.join(here)} (nearest: {nearest})")

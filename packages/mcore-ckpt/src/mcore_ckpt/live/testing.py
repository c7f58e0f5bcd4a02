"""What every transport must do, and two that are made for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mcore_ckpt.live.link import LiveTransfer
from mcore_ckpt.live.transport import Transport
from mcore_parallel.collectives import barrier
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout


class FolderTransport:
    """A transport whose bytes go through files of a folder that all ranks see.

    It needs no network between the ranks, and shows how little a transport has to be.
    """

    def __init__(self, group: Group, folder: Path) -> None:
        self._group = group
        self._folder = folder
        self._calls = 0

    @property
    def device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def exchange(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Write a file for each member, wait for all, and read those for this rank."""
        self._calls += 1
        own = self._group.rank
        parts = torch.split(outgoing, list(send_sizes))
        for member, part in enumerate(parts):
            self._file(own, member).write_bytes(part.numpy().tobytes())
        barrier(self._group.cpu)
        received = [self._file(member, own).read_bytes() for member in range(self._group.size)]
        for data, size in zip(received, receive_sizes, strict=True):
            assert len(data) == size
        for member in range(self._group.size):
            self._file(member, own).unlink()
        return torch.frombuffer(bytearray(b"".join(received) or b"\0"), dtype=torch.uint8)[
            : sum(receive_sizes)
        ]

    def close(self) -> None:
        """Do nothing: nothing is left in the folder."""

    def _file(self, source: int, target: int) -> Path:
        return self._folder / f"{self._calls}.{source}.{target}"


class FaultyTransport:
    """A transport that flips one bit of what another one brings to `rank`, in call `call`."""

    def __init__(self, inner: Transport, *, on: bool, call: int = 1, byte: int = 0) -> None:
        self._inner = inner
        self._on = on
        self._left = call
        self._byte = byte

    @property
    def device(self) -> torch.device:
        """Return that of the other."""
        return self._inner.device

    def exchange(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Exchange through the other transport, and flip the bit when its time has come."""
        received = self._inner.exchange(outgoing, send_sizes, receive_sizes)
        self._left -= 1
        if self._on and self._left == 0:
            received = received.clone()
            received[self._byte] ^= 4
        return received

    def close(self) -> None:
        """Close the other."""
        self._inner.close()


def check_transport(make: Callable[[Group], Transport], group: Group) -> None:
    """Check that a transport does what `Transport` says; every rank of a group of 2 or more calls.

    Raises:
        AssertionError: it does not.
    """
    assert group.size > 1, "a transport is checked between two ranks or more"
    transport = make(group)
    assert isinstance(transport, Transport)
    patterns: list[Callable[[int, int], int]] = [
        lambda a, b: 0,  # nobody sends anything
        lambda a, b: 16 * (a + 1),  # everybody to everybody, uneven
        lambda a, b: 48 if (a, b) == (0, group.size - 1) else 0,  # one pair alone
        lambda a, b: 32 if a == 0 else 0,  # the first to all others
        lambda a, b: 80 if b == 0 else 0,  # all others to the first
        lambda a, b: 3 << 20,  # more than fits into one message of most transports
        lambda a, b: 1 + (a + 2 * b) % 5,  # sizes that are no multiple of anything
    ]
    for turn, pattern in enumerate(patterns * 2):
        _check_exchange(transport, group, turn, pattern)
    transport.close()
    _check_link(make, group)


def _check_exchange(
    transport: Transport, group: Group, turn: int, size: Callable[[int, int], int]
) -> None:
    own, everyone = group.rank, range(group.size)
    send = [0 if other == own else size(own, other) for other in everyone]
    receive = [0 if other == own else size(other, own) for other in everyone]
    outgoing = torch.cat([_bytes(own, other, turn, n) for other, n in enumerate(send)])
    outgoing = outgoing.to(transport.device)
    before = outgoing.clone()
    received = transport.exchange(outgoing, send, receive)
    assert torch.equal(outgoing, before), "what is sent must not change"
    outgoing.fill_(255)  # it is the caller's again
    expected = torch.cat([_bytes(other, own, turn, n) for other, n in enumerate(receive)])
    assert received.dtype == torch.uint8
    assert received.device.type == transport.device.type
    assert torch.equal(received.cpu(), expected), f"turn {turn}: other bytes than were sent"


def _bytes(source: int, target: int, turn: int, size: int) -> torch.Tensor:
    first = 31 * source + 17 * target + 7 * turn
    return (torch.arange(size, dtype=torch.int64) * 13 + first).remainder(256).to(torch.uint8)


def _check_link(make: Callable[[Group], Transport], group: Group) -> None:
    """Rows of the first ranks into columns of all, through rounds of few bytes, and verified."""
    value = torch.arange(24.0 * group.size).view(12, 2 * group.size)
    whole = TensorLayout.whole("model/w", tuple(value.shape))
    rows = TensorLayout.padding((0, 2 * group.size))
    sources = {}
    if group.rank < 2:
        rows = whole.slice(0, 6 * group.rank, 6 * group.rank + 6)
        part = value[6 * group.rank : 6 * group.rank + 6]
        sources["rows"] = LayoutTensor(part.clone(), rows)
    columns = whole.slice(1, 2 * group.rank, 2 * group.rank + 2)
    target = LayoutTensor(torch.zeros(12, 2), columns)
    transport = make(group)
    link = LiveTransfer(sources, {"columns": target}, group, transport=transport, max_bytes=32)
    link(verify=True)
    assert torch.equal(target.tensor, value[:, 2 * group.rank : 2 * group.rank + 2])
    transport.close()

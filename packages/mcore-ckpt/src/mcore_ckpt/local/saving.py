"""Saving to a directory of each machine, and sending copies to others."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.addresses import local_path
from mcore_ckpt.advice import with_advice
from mcore_ckpt.agreement import together
from mcore_ckpt.dtypes import check_dense
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.local.share import PART, ShareName, publish, write_share
from mcore_ckpt.planning import describe
from mcore_ckpt.request import check_same, make_request
from mcore_parallel.collectives import all_to_all
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor

_PIECE = 64 << 20


def save_local(
    directory: str | os.PathLike[str],
    *,
    step: int,
    tensors: Mapping[str, LayoutTensor],
    state: Mapping[str, Any] | None = None,
    group: Group | None = None,
    copies: int = 1,
    host: str | None = None,
    piece_bytes: int = _PIECE,
) -> None:
    """Write every rank's tensors as one file each below `directory`, which is each machine's own.

    Every rank of `group` (default: this process alone) calls it and communicates over the group's
    CPU twin. When it returns the files are durable (on a RAM disk: as durable as that is), and
    those of earlier local saves are gone: the directory holds one save. So for a moment there are
    two. When it raises, the earlier one is there as before.

    directory: on a local disk or a RAM disk; ranks of one machine may share one.
    tensors, state: as for `mcore_ckpt.save`. Replicas are not left out.
    copies: how many other machines receive a copy of each rank's file: so many machines may be lost
        together. With one machine, or more copies than others, other ranks stand in for machines.
    host: what tells the machine of this rank from others; by default its name.
    piece_bytes: bound on what a rank sends at one time.

    Raises:
        ValueError: on every rank: arguments that cannot be saved, or that differ between ranks.
        CheckpointError: on every rank: writing failed on some rank; says where, why, and what can
            be done.
    """
    folder = local_path(directory).absolute()
    group = (group or Group.single()).cpu
    what = f"saving step {step} to {folder} failed, nothing was saved there"
    state = {} if state is None else state

    def ask() -> dict[str, Any]:
        if copies < 0:
            raise ValueError(f"copies is {copies}; nearest valid: 0")
        request = make_request(
            step=step,
            keep_last=None,
            keep_every=None,
            chunk_bytes=DEFAULT_CHUNK_BYTES,
            exchange_bytes=piece_bytes,
            state=state,
        )
        check_dense(tensors)
        describe(tensors)  # finds what cannot be saved while all ranks listen
        own = {"save": uuid.uuid4().hex[:16], "host": host or socket.gethostname()}
        return {**request, **own, "copies": copies}

    requests = together(group, what, ask)
    check_same(requests, state, group)
    name = ShareName(step=step, save=requests[0]["save"], rank=group.rank, size=group.size)
    hosts = [str(request["host"]) for request in requests]

    def write() -> int:
        folder.mkdir(parents=True, exist_ok=True)
        path = write_share(folder, name, tensors, describe(tensors), state)
        return path.stat().st_size

    try:
        sizes = together(group, what, lambda: with_advice(write))
        copying = _Copying(
            folder=folder, name=name, sizes=sizes, group=group, what=what, piece_bytes=piece_bytes
        )
        for receivers in peers(hosts, copies):
            copying.run(receivers)
    except Exception:
        _remove(folder, lambda found: found.save == name.save)
        raise
    _remove(folder, lambda found: found.save != name.save)


def peers(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """Return, for each copy, the rank that receives it from each rank: on another host."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    machines = list(ranks_of.values())
    if len(machines) < 2:
        machines = [[rank] for rank in range(len(hosts))]
    result = []
    for distance in range(1, min(copies, len(machines) - 1) + 1):
        receivers = [0] * len(hosts)
        for number, ranks in enumerate(machines):
            others = machines[(number + distance) % len(machines)]
            for i, rank in enumerate(ranks):
                receivers[rank] = others[i % len(others)]
        result.append(receivers)
    return result


@dataclass(frozen=True, kw_only=True)
class _Copying:
    """Sends this rank's file piece by piece, and writes what others send. sizes: of all files."""

    folder: Path
    name: ShareName
    sizes: Sequence[int]
    group: Group
    what: str
    piece_bytes: int

    def run(self, receivers: Sequence[int]) -> None:
        """Send each rank's file to its receiver; on return all copies are durable."""
        senders = [rank for rank, receiver in enumerate(receivers) if receiver == self.group.rank]
        parts = {rank: self._part(rank) for rank in senders}
        try:
            failure = self._exchange(receivers[self.group.rank], parts)

            def finish() -> None:
                if failure is not None:
                    raise failure
                for rank, part in parts.items():
                    publish(part, self.folder / str(self._of(rank)))

            together(self.group, self.what, lambda: with_advice(finish))
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    def _exchange(self, receiver: int, parts: Mapping[int, Path]) -> OSError | None:
        """Send and receive everything; a rank that cannot write goes on doing so."""
        failure: OSError | None = None
        with contextlib.ExitStack() as stack:
            own: Any = None
            files: dict[int, Any] = {}
            try:
                own = stack.enter_context((self.folder / str(self.name)).open("rb"))
                for rank, part in parts.items():
                    files[rank] = stack.enter_context(part.open("wb"))
            except OSError as error:
                failure = error
            for start in range(0, max(self.sizes), self.piece_bytes):
                counts = [max(0, min(self.piece_bytes, size - start)) for size in self.sizes]
                piece = bytearray(counts[self.group.rank])
                if failure is None:
                    try:
                        own.readinto(piece)
                    except OSError as error:
                        failure = error
                pieces = self._all_to_all(piece, receiver, {rank: counts[rank] for rank in parts})
                try:
                    for rank, data in pieces.items():
                        if failure is None:
                            files[rank].write(data)
                except OSError as error:
                    failure = error
            try:
                for file in files.values():
                    file.flush()
            except OSError as error:
                failure = failure or error
        return failure

    def _all_to_all(
        self, piece: bytearray, receiver: int, counts: Mapping[int, int]
    ) -> dict[int, memoryview]:
        given, taken = [0] * self.group.size, [0] * self.group.size
        given[receiver] = len(piece)
        for rank, count in counts.items():
            taken[rank] = count
        sent = torch.frombuffer(piece, dtype=torch.uint8) if piece else torch.empty(0).byte()
        received = all_to_all(sent, self.group, taken, given)
        parts = torch.split(received, taken)
        return {rank: parts[rank].numpy().data for rank in counts}

    def _of(self, rank: int) -> ShareName:
        return replace(self.name, rank=rank)

    def _part(self, rank: int) -> Path:
        return self.folder / f"{self._of(rank)}.{os.getpid()}.{self.group.rank}{PART}"


def _remove(folder: Path, unwanted: Callable[[ShareName], bool]) -> None:
    """Remove the files of some saves; what cannot be removed now goes after the next save."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            found = ShareName.parse(entry.name.split(".share")[0] + ".share")
            if found is not None and unwanted(found):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

"""What is measured, as it runs on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mcore_ckpt.asynchronous import AsyncSaver
from mcore_ckpt.bench.disk import drop_cache
from mcore_ckpt.bench.memory import forget_peak, peak_bytes
from mcore_ckpt.loading import load
from mcore_ckpt.saving import save
from mcore_parallel.collectives import all_gather_object, barrier
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout

_BLOCK = 8 << 20  # bytes of one write of the raw files
_ODD = 1000  # elements of a vector before the matrices: so no shard ends where a chunk does
_SMALL = (64, 16)
_WRITES = ("raw write", "dcp save", "save", "save flat")  # onto the disk
_READS = ("raw read", "dcp load", "load", "load flat")  # from there
Job = Callable[[], float | None]
Turns = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """By what was measured, a number for each turn.

    seconds: of the slowest rank. cpu: seconds of all ranks' processors. memory: by how much a
    rank's peak rose above what it had, in bytes; the largest. Empty where the system cannot tell.
    """

    seconds: Turns = field(default_factory=dict)
    cpu: Turns = field(default_factory=dict)
    memory: Turns = field(default_factory=dict)


def measure(folder: Path, num_tensors: int, size: int, num_small: int, repeats: int) -> Measured:
    """Measure everything `repeats` times in turn, so that a busy moment meets ours and others.

    num_tensors, size: the state, square float32 matrices, cut in rows over the ranks. num_small:
    tensors of 4 KiB that are saved by themselves. Every rank of the world calls it with the same
    arguments and gets the same answer.
    """
    group = Group.world()
    case = _Case(group, folder, num_tensors, size, num_small)
    measured = Measured()
    for turn in range(repeats):
        # Its first save gets the memory of the copy, as that of a run does; later ones have it.
        with AsyncSaver(group) as saver:
            jobs = case.jobs(saver, turn)
            for name in in_order(list(jobs), turn):
                # What is compared finds nothing left to be written, and none of its files cached.
                if name in _WRITES + _READS and group.rank == 0:
                    drop_cache(folder / str(turn))
                _measure(measured, name, jobs[name], group)
                saver.wait()
        barrier(group)
        if group.rank == 0:
            _empty(folder / str(turn))
    for turn in range(repeats):
        _measure(measured, "save small", partial(case.save_small, folder / f"small.{turn}"), group)
    return measured


def _measure(measured: Measured, name: str, job: Job, group: Group) -> None:
    """Run a job; its seconds are those that it timed itself, where it did."""
    knows_peak = forget_peak()
    barrier(group)
    before = peak_bytes() if knows_peak else 0
    start, cpu = time.perf_counter(), time.process_time()
    own = job()
    seconds = time.perf_counter() - start if own is None else own
    row = (seconds, time.process_time() - cpu, peak_bytes() - before if knows_peak else -1)
    rows = all_gather_object(row, group)
    measured.seconds.setdefault(name, []).append(max(row[0] for row in rows))
    measured.cpu.setdefault(name, []).append(sum(row[1] for row in rows))
    if all(row[2] >= 0 for row in rows):
        measured.memory.setdefault(name, []).append(max(row[2] for row in rows))


def _empty(folder: Path) -> None:
    """Give back the blocks of all files, not the files: they are removed when all is over.

    ext4 looks long for the inodes of new files where as many were given back within the last
    minutes. A run, which has those minutes, does not meet that.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


def in_order(names: list[str], turn: int) -> list[str]:
    """Return what is done in a turn: each time another one of those that are compared is first."""
    order = list(names)
    for kind in (_WRITES, _READS):
        first = names.index(kind[0])
        shift = turn % len(kind)
        order[first : first + len(kind)] = [*kind[shift:], *kind[:shift]]
    return order


class _Case:
    """The state of one rank, in rows and in flat shards, and what is done with it."""

    def __init__(
        self, group: Group, folder: Path, num_tensors: int, size: int, num_small: int
    ) -> None:
        self.group = group
        self.folder = folder
        odd = TensorLayout.whole("model/odd", (_ODD,))
        wholes = [TensorLayout.whole(f"model/{i}", (size, size)) for i in range(num_tensors)]
        self.rows = {"odd": LayoutTensor(torch.ones(_ODD), odd.replicated(group.rank, group.size))}
        for i, whole in enumerate(wholes):
            layout = self._cut(whole)
            value = torch.full(layout.shape, float(i + group.rank))
            self.rows[str(i)] = LayoutTensor(value, layout)
        bucket = TensorLayout.concat([odd, *(whole.reshaped((whole.numel,)) for whole in wholes)])
        share = -(-bucket.numel // group.size)
        low, high = (min(share * rank, bucket.numel) for rank in (group.rank, group.rank + 1))
        # As many bytes once more, as one flat tensor: what a sharded optimizer holds.
        self.flat = {
            "shard": LayoutTensor(torch.full((high - low,), 1.0), bucket.flat_range(low, high))
        }
        self.small = {}
        for i in range(num_small):
            layout = self._cut(TensorLayout.whole(f"model/small.{i}", _SMALL))
            self.small[str(i)] = LayoutTensor(torch.ones(layout.shape), layout)
        mesh = init_device_mesh("cpu", (group.size,))
        self.state = {
            key: DTensor.from_local(value.tensor, mesh, [Shard(0)], run_check=False)
            for key, value in self.rows.items()
            if key != "odd"
        }

    def _cut(self, whole: TensorLayout) -> TensorLayout:
        rows = -(-whole.shape[0] // self.group.size)
        low, high = (
            min(rows * rank, whole.shape[0]) for rank in (self.group.rank, self.group.rank + 1)
        )
        return whole.slice(0, low, high)

    def jobs(self, saver: AsyncSaver, turn: int) -> dict[str, Job]:
        """Return what is measured in one turn, in order."""
        root = self.folder / str(turn)
        if self.group.rank == 0:
            root.mkdir(parents=True)
        barrier(self.group)
        raw = root / f"raw.{self.group.rank}"
        kept = {key: torch.empty_like(value.tensor) for key, value in self.rows.items()}

        def copy() -> None:
            for key, value in self.rows.items():
                kept[key].copy_(value.tensor)

        def stall(step: int) -> float:
            pending = saver.save(root / "async", step=step, tensors=self.rows, keep_last=1)
            pending.wait()
            return pending.stalled

        return {
            "raw write": lambda: self._write_raw(raw),
            "dcp save": lambda: self._save_dcp(root / "dcp"),
            "save": lambda: self._save(root / "rows", self.rows),
            "save flat": lambda: self._save(root / "flat", self.flat),
            "raw read": lambda: _read_raw(raw),
            "dcp load": lambda: self._load_dcp(root / "dcp"),
            "load": lambda: self._load(root / "rows", self.rows),
            "load flat": lambda: self._load(root / "rows", self.flat),
            "first host copy": copy,
            "first stall": partial(stall, 1),
            "host copy": copy,
            "stall": partial(stall, 2),
        }

    def save_small(self, path: Path) -> None:
        """Save many small tensors by themselves."""
        self._save(path, self.small)

    def _write_raw(self, path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for value in self.rows.values():
                data = value.tensor.view(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), _BLOCK):
                    file.write(data[start : start + _BLOCK])
            os.fsync(file.fileno())

    def _save_dcp(self, path: Path) -> None:
        save_dcp(self.state, storage_writer=FileSystemWriter(path, sync_files=True))
        dist.barrier()

    def _load_dcp(self, path: Path) -> None:
        load_dcp(self.state, storage_reader=FileSystemReader(path))

    def _save(self, path: Path, tensors: Mapping[str, LayoutTensor]) -> None:
        save(path, step=1, tensors=tensors, group=self.group)

    def _load(self, path: Path, tensors: Mapping[str, LayoutTensor]) -> None:
        load(path, tensors, self.group)


def _read_raw(path: Path) -> None:
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass

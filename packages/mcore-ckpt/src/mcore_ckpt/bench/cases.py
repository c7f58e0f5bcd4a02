"""What is measured, as it runs on every rank."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
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
from mcore_ckpt.loading import load
from mcore_ckpt.saving import save
from mcore_parallel.collectives import all_gather_object, barrier
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor, TensorLayout

_BLOCK = 8 << 20  # bytes of one write of the raw files
Seconds = dict[str, list[float]]


def measure(folder: Path, num_tensors: int, size: int, repeats: int) -> Seconds:
    """Measure everything `repeats` times in turn; return wall seconds by what took them.

    num_tensors, size: the state, square float32 matrices, cut in rows over the ranks. Every rank of
    the world calls it with the same arguments and gets the same answer: of the slowest rank.
    """
    group = Group.world()
    case = _Case(group, folder, num_tensors, size)
    seconds: Seconds = {}
    with AsyncSaver(group) as saver:
        for turn in range(repeats):
            for name, job in case.jobs(saver, turn).items():
                seconds.setdefault(name, []).append(_timed(job, group))
            saver.wait()
            barrier(group)
            if group.rank == 0:
                shutil.rmtree(folder / str(turn))
    return seconds


def _timed(job: Callable[[], float | None], group: Group) -> float:
    """Return the seconds of the slowest rank (of what the job itself timed, where it did)."""
    barrier(group)
    start = time.perf_counter()
    own = job()
    seconds = time.perf_counter() - start if own is None else own
    return max(all_gather_object(seconds, group))


class _Case:
    """The state of one rank, in rows and in flat shards, and what is done with it."""

    def __init__(self, group: Group, folder: Path, num_tensors: int, size: int) -> None:
        self.group = group
        self.folder = folder
        rows = size // group.size
        wholes = [TensorLayout.whole(f"model/{i}", (size, size)) for i in range(num_tensors)]
        values = [torch.full((rows, size), float(i + group.rank)) for i in range(num_tensors)]
        self.rows = {
            str(i): LayoutTensor(value, whole.slice(0, rows * group.rank, rows * (group.rank + 1)))
            for i, (whole, value) in enumerate(zip(wholes, values, strict=True))
        }
        bucket = TensorLayout.concat([whole.reshaped((whole.numel,)) for whole in wholes])
        share = bucket.numel // group.size
        layout = bucket.flat_range(share * group.rank, share * (group.rank + 1))
        # The same bytes once more, as one flat tensor: what a sharded optimizer holds.
        self.flat = {"shard": LayoutTensor(torch.cat([v.view(-1) for v in values]), layout)}
        mesh = init_device_mesh("cpu", (group.size,))
        self.state = {
            key: DTensor.from_local(value.tensor, mesh, [Shard(0)], run_check=False)
            for key, value in self.rows.items()
        }

    def jobs(self, saver: AsyncSaver, turn: int) -> dict[str, Callable[[], float | None]]:
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

        def stall() -> float:
            return saver.save(root / "async", step=turn + 1, tensors=self.rows).stalled

        def cold(job: Callable[[], None]) -> Callable[[], float]:
            return lambda: self._cold(root, job)

        return {
            "raw write": lambda: self._write_raw(raw),
            "dcp save": lambda: self._save_dcp(root / "dcp"),
            "save": lambda: self._save(root / "rows", self.rows),
            "save flat": lambda: self._save(root / "flat", self.flat),
            "raw read": cold(lambda: _read_raw(raw)),
            "dcp load": cold(lambda: self._load_dcp(root / "dcp")),
            "load": cold(lambda: self._load(root / "rows", self.rows)),
            "load flat": cold(lambda: self._load(root / "rows", self.flat)),
            "host copy": copy,  # the first touch of the memory
            "host copy again": copy,
            "async stall": stall,
        }

    def _cold(self, root: Path, job: Callable[[], None]) -> float:
        if self.group.rank == 0:
            drop_cache(root)
        barrier(self.group)
        start = time.perf_counter()
        job()
        return time.perf_counter() - start

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

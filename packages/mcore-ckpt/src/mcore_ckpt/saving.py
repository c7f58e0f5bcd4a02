"""Saving: plan, exchange, write, agree, commit."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from mcore_ckpt.addresses import Place, check_shared, place, storage_at
from mcore_ckpt.advice import with_advice
from mcore_ckpt.agreement import together
from mcore_ckpt.alike import digest_of, split
from mcore_ckpt.attachments import collect_files
from mcore_ckpt.codecs import Codec
from mcore_ckpt.commit import begin, remove_checkpoint, retain
from mcore_ckpt.completing import complete
from mcore_ckpt.documents import ArrayDocuments
from mcore_ckpt.dtypes import check_dense, plain, stored_type, to_numpy
from mcore_ckpt.engine import ChunkData, Engine, Writing
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.manifest import check_json
from mcore_ckpt.marks import check_mark, is_marked, new_mark
from mcore_ckpt.names import DOCUMENT
from mcore_ckpt.planning import Chunk, Round, WritePlan, describe
from mcore_ckpt.plans import Plans
from mcore_ckpt.request import check_same, make_request
from mcore_ckpt.storage import Storage
from mcore_ckpt.writer import Writer
from mcore_parallel.group import Group
from mcore_parallel.layout import Copy, LayoutTensor, transfer

T = TypeVar("T")
DEFAULT_EXCHANGE_BYTES = 256 << 20


def save(
    directory: str | os.PathLike[str],
    *,
    step: int,
    tensors: Mapping[str, LayoutTensor],
    state: Mapping[str, Any] | None = None,
    group: Group | None = None,
    files: Mapping[str, Path | bytes] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    exchange_bytes: int = DEFAULT_EXCHANGE_BYTES,
    compression: str | None = None,
    file_bytes: int | None = None,
    storage: Storage | None = None,
    engine: Engine | None = None,
    cancel: threading.Event | None = None,
    plans: Plans | None = None,
) -> Place:
    """Write a checkpoint of `step` below `directory` and return its path once it is committed.

    Every rank of `group` (default: this process alone) calls it and communicates over the group's
    CPU twin. It returns on all of them when the checkpoint is durable, or raises on all of them;
    then nothing is committed and the checkpoints that were there are as before. One save at a time
    may run in a directory.

    directory: a path, or an address in object storage (`s3://bucket/runs/demo`, see
        `mcore_ckpt.addresses.storage_at`), the same on every rank.
    tensors: this rank's local tensors by any local key; the layouts name the global tensors,
        `prefix/name`. Padding is not saved, and of replicas one is. Where fp32 master weights
        exist, give those for `model/…`.
    state: whatever is no tensor, as JSON values; the same on every rank.
    files: files to keep with it by name below `files/`: contents, or a path to a file or directory
        to copy. Those of the group's rank 0 are taken.
    keep_last: after the commit, remove older steps but for the newest ones; at least 1, which is
        the new checkpoint itself. None keeps all. Newer steps are never touched.
    keep_every: steps that are multiples of it are kept all the same. Given alone it is as with
        keep_last=1.
    chunk_bytes: upper bound on the size of a chunk; chunks depend on nothing else but a tensor's
        shape and dtype.
    exchange_bytes: bound on the chunks that a rank puts together in memory at one time (two such
        portions are in memory while one is being written).
    compression: of chunks: `zstd`, `zstd:LEVEL`, `blosc` or `blosc:NAME:LEVEL` (see `Codec`); None,
        the default, is faster to write and to read in part.
    file_bytes: upper bound on the size of files that hold many chunks each (zarr's sharding), for
        storages that like few large ones; chunks stay what is read. Each has one writer, in whose
        memory it is put together. None: a file for each chunk.
    storage, engine: in place of what is below `directory`, and of plain files (of tensorstore for
        what is compressed or holds many chunks).
    cancel: when another thread of any rank sets it before the commit begins, the save ends on all
        ranks with CheckpointError.
    plans: where the plan is kept for the next save that is given the same object, on all ranks.

    Raises:
        ValueError: on every rank: names, dtypes or layouts that do not fit together (a region that
            two ranks claim, or none), state that is not JSON or differs between ranks.
        FileNotFoundError: on every rank: a file to attach does not exist.
        CheckpointError: on every rank: writing failed on some rank, or it lacked the memory for its
            part of the exchange; says where and why.
    """
    if engine is None:
        from mcore_ckpt.default_engine import DefaultEngine

        engine = DefaultEngine()
    group = (group or Group.single()).cpu
    what = f"saving step {step} to {os.fspath(directory)} failed, nothing was committed"
    state = {} if state is None else state
    description: dict[str, Any] = {}
    opened: list[Storage] = []

    def ask() -> dict[str, Any]:
        check_dense(tensors)
        if storage is None:
            check_shared(directory, group.size)
        opened.append(storage or storage_at(directory))
        request = make_request(
            step=step,
            keep_last=keep_last,
            keep_every=keep_every,
            chunk_bytes=chunk_bytes,
            exchange_bytes=exchange_bytes,
            state=state,
            compression=compression,
            file_bytes=file_bytes,
        )
        asked = {"compression": compression, "file_bytes": file_bytes}
        for option, value in asked.items():
            if value is not None and not engine.encodes:
                raise ValueError(
                    f"{option} is {value!r}, and {type(engine).__name__} writes chunks as they "
                    f"are: give no engine, or TensorstoreEngine"
                )
        shared, replicas = split(describe(tensors))
        description.update(shared)
        return {**request, "tensors": digest_of(shared), "replicas": replicas}

    requests = together(group, what, ask)
    check_same(requests, state, group)
    plan = (plans or Plans()).plan(
        description,
        [request["tensors"] for request in requests],
        [request["replicas"] for request in requests],
        group,
        what,
        chunk_bytes=chunk_bytes,
        exchange_bytes=exchange_bytes,
        codec=None if compression is None else Codec.parse(compression),
        file_bytes=file_bytes,
    )
    saving = _Saving(
        step=step,
        group=group,
        storage=opened[0],
        engine=engine,
        what=what,
        plan=plan,
        cancel=cancel or threading.Event(),
    )
    name = saving.run(tensors, check_json(state), files or {})
    if group.rank == 0 and (keep_last, keep_every) != (None, None):
        _retain(saving.storage, name, keep_last, keep_every)
    return place(directory) / name


def _retain(storage: Storage, name: str, keep_last: int | None, keep_every: int | None) -> None:
    try:
        retain(storage, name, keep_last, keep_every)
    except OSError as error:  # the new checkpoint stands all the same
        warnings.warn(f"cannot remove old checkpoints: {error}", RuntimeWarning, stacklevel=3)


def _on_cpu(tensors: Mapping[str, LayoutTensor]) -> dict[str, torch.Tensor]:
    return {key: plain(value.tensor) for key, value in tensors.items()}


@dataclass(kw_only=True)
class _Saving:
    """One save under way on one rank. `checksums` are of the chunks that this rank writes.

    mark: what tells its directory from another save's. commits: whether that was looked at last.
    """

    step: int
    group: Group
    storage: Storage
    engine: Engine
    what: str
    plan: WritePlan
    cancel: threading.Event
    checksums: dict[Chunk, tuple[int, ...]] = field(default_factory=dict)
    documents: ArrayDocuments = field(default_factory=ArrayDocuments)
    mark: bytes = field(default_factory=new_mark)
    commits: bool = False

    def run(
        self, tensors: Mapping[str, LayoutTensor], state: Any, files: Mapping[str, Path | bytes]
    ) -> str:
        """Write and commit; return the checkpoint's name."""
        first = self.group.rank == 0
        contents: dict[str, bytes] = {}

        def start() -> str | None:
            if not first:
                return None
            contents.update(collect_files(files))
            try:
                return with_advice(lambda: begin(self.storage, self.step, self.mark))
            except FileNotFoundError as error:  # swept at once
                raise CheckpointError(
                    f"{error}: another save runs in the same directory, and only one may at a time"
                ) from error

        passing = (ValueError, FileNotFoundError)
        name: str = together(self.group, self.what, start, passing=passing)[0]
        writer = Writer(self.storage, name)
        try:
            failure = self._write(name, writer, tensors)

            def settle() -> list[tuple[str, int, int]]:
                self._check_cancel()
                if first:
                    check_mark(self.storage, name, self.mark)
                if failure:
                    raise failure
                try:
                    writer.sync()
                except FileNotFoundError:
                    if first:
                        check_mark(self.storage, name, self.mark)
                    raise
                return [
                    (chunk.name, number, crc)
                    for chunk, sums in self.checksums.items()
                    for number, crc in zip(
                        self.plan.tensors[chunk.name].inside(chunk.number), sums, strict=True
                    )
                ]

            rows = together(self.group, self.what, lambda: with_advice(settle))

            def commit_all() -> None:
                check_mark(self.storage, name, self.mark)
                self.commits = True
                self._commit(name, writer, rows, state, contents)

            together(self.group, self.what, lambda: first and with_advice(commit_all))
        except (CheckpointError, ValueError):
            if first:  # gives the space back; if that fails too, the next save sweeps it
                with contextlib.suppress(OSError):
                    if self.commits or is_marked(self.storage, name, self.mark):
                        remove_checkpoint(self.storage, name)
            raise
        return name

    def _write(
        self, name: str, writer: Writer, tensors: Mapping[str, LayoutTensor]
    ) -> Exception | None:
        """Exchange and write round by round; return what went wrong in writing on this rank.

        A rank that cannot write goes on exchanging, since the others need what it holds. One that
        lacks the memory to exchange cannot: then all ranks raise CheckpointError together.
        """
        failure: Exception | None = None
        writing: tuple[list[Chunk], Writing] | None = None
        sources = self._on_all_ranks(lambda: _on_cpu(tensors))
        try:
            for batch in self.plan.rounds:
                whole, copies = self._held_whole(batch, sources)
                buffers = self._on_all_ranks(partial(self._allocate, batch, whole))
                transfer(copies, sources, buffers, self.group)
                try:
                    self._finish(writing)
                    writing = None
                    if failure is None:
                        chunks = self._chunks(name, writer, batch, {**buffers, **whole})
                        written = batch.of(self.group.rank)
                        writing = (written, self.engine.write(self.storage, chunks))
                except Exception as error:  # reported to all ranks at the end
                    failure = failure or error
        finally:  # also on the way out: nothing may still be written when the rest is removed
            try:
                self._finish(writing)
            except Exception as error:
                failure = failure or error
        return failure

    def _finish(self, writing: tuple[list[Chunk], Writing] | None) -> None:
        """Wait for the chunks of a round and keep their checksums."""
        if writing:
            chunks, written = writing
            sums = iter(written.wait())
            for chunk in chunks:
                count = len(self.plan.tensors[chunk.name].inside(chunk.number))
                self.checksums[chunk] = tuple(islice(sums, count))

    def _held_whole(
        self, batch: Round, sources: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[Copy]]:
        """Return the chunks of a round that lie whole in this rank's tensors, as views of those.

        They are written from where they are. With them, the copies that the other chunks need.
        """
        me = self.group.ranks[self.group.rank]
        tensors = self.plan.tensors
        shapes = {c.key: tensors[c.name].files.chunk_shape for c in batch.of(self.group.rank)}
        whole, copies = {}, []
        for copy in batch.copies:
            if copy.source.rank == copy.target.rank == me and copy.shape == shapes[copy.target.key]:
                source = sources[copy.source.key]
                whole[copy.target.key] = source.as_strided(
                    copy.shape,
                    copy.source.strides,
                    int(source.storage_offset()) + copy.source.offset,
                )
            else:
                copies.append(copy)
        return whole, copies

    def _check_cancel(self) -> None:
        if self.cancel.is_set():
            raise CheckpointError("it was abandoned")

    def _on_all_ranks(self, make: Callable[[], T]) -> T:
        """Return what `make` makes on this rank, once every rank has made its own.

        Ranks meet here before they exchange anything: if one fails, none waits for it.
        """
        made: list[T] = []

        def run() -> None:
            self._check_cancel()
            made.append(make())

        together(self.group, self.what, run, passing=())
        return made[0]

    def _allocate(self, batch: Round, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a buffer for each other chunk of a round that this rank writes; zeros at edges."""
        buffers = {}
        for chunk in batch.of(self.group.rank):
            if chunk.key in whole:
                continue
            info = self.plan.tensors[chunk.name]
            dtype = stored_type(info.dtype).torch
            full = info.files.box(chunk.number).shape == info.files.chunk_shape
            make = torch.empty if full else torch.zeros
            buffers[chunk.key] = make(info.files.chunk_shape, dtype=dtype)
        return buffers

    def _chunks(
        self, name: str, writer: Writer, batch: Round, buffers: Mapping[str, torch.Tensor]
    ) -> list[ChunkData]:
        """Create the arrays that this rank's chunks of a round belong to, and return the chunks."""
        chunks = []
        for chunk in batch.of(self.group.rank):
            info = self.plan.tensors[chunk.name]
            writer.make_directory(chunk.name)
            if chunk.number == 0:
                writer.put(f"{chunk.name}/{DOCUMENT}", self.documents(info))
            writer.wrote(f"{chunk.name}/{info.files.key(chunk.number)}")
            chunks.append(
                ChunkData(
                    array=f"{name}/{chunk.name}",
                    info=info,
                    number=chunk.number,
                    data=to_numpy(buffers[chunk.key]),
                )
            )
        return chunks

    def _commit(
        self,
        name: str,
        writer: Writer,
        rows: list[list[tuple[str, int, int]]],
        state: Any,
        contents: Mapping[str, bytes],
    ) -> None:
        """On rank 0, when the chunks are durable: remaining documents, files, manifest, marker."""
        checksums: dict[str, dict[int, int]] = {tensor: {} for tensor in self.plan.tensors}
        for row in rows:
            for tensor, number, crc in row:
                checksums[tensor][number] = crc
        complete(
            self.storage,
            name,
            writer,
            step=self.step,
            tensors={
                tensor: replace(
                    info,
                    crc32=tuple(checksums[tensor][i] for i in range(info.grid.num_chunks)),
                )
                for tensor, info in self.plan.tensors.items()
            },
            state=state,
            files=contents,
        )

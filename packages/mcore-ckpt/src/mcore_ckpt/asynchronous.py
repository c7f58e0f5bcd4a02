"""Saving while training goes on: a snapshot now, everything else in a thread behind it.

The thread plans, exchanges, writes and commits exactly as `save` does, over process groups of its
own, so that its collectives and those of the training never meet.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from mcore_ckpt.addresses import Place
from mcore_ckpt.agreement import together
from mcore_ckpt.engine import Engine
from mcore_ckpt.grid import DEFAULT_CHUNK_BYTES
from mcore_ckpt.local import save_local
from mcore_ckpt.manifest import check_json
from mcore_ckpt.plans import Plans
from mcore_ckpt.saving import DEFAULT_EXCHANGE_BYTES, save
from mcore_ckpt.snapshot import HostMemory
from mcore_ckpt.storage import Storage
from mcore_parallel.collectives import all_reduce
from mcore_parallel.group import Group
from mcore_parallel.layout import LayoutTensor

Snapshot: TypeAlias = dict[str, LayoutTensor]
_PATIENCE = 10.0  # seconds that an abandoned save has to clean up behind itself


class PendingSave:
    """A save that was requested. `step`: of which step, whenever it is completed.

    stalled: seconds for which the request held up the caller, with the wait for the save before.
    is_local: whether it is one of `save_local`.
    """

    def __init__(self, step: int, *, is_local: bool = False) -> None:
        self.step = step
        self.is_local = is_local
        self.stalled = 0.0
        self.cancel = threading.Event()
        self._ended = threading.Event()
        self._path: Place | None = None
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over on this rank, well or not."""
        return self._ended.is_set()

    def wait(self) -> Place:
        """Return the checkpoint's path or address once it is durable.

        Raises:
            ValueError, FileNotFoundError, CheckpointError: on every rank, as `save`.
            CollectiveError: another rank is gone.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self, job: Callable[[], Place]) -> None:
        try:
            self._path = job()
        except Exception as error:  # raised in the thread that asks for the result
            self._error = error
        finally:
            self._ended.set()


class AsyncSaver:
    """Saves in the background, one at a time.

        with AsyncSaver(mesh.world) as saver:
            for step in …:
                …
                saver.save("run", step=step, tensors=…)   # returns when the state is copied
                for done in saver.poll():                 # completed meanwhile, on all ranks
                    print(f"step {done.step} is saved as {done.wait()}")

    `save` copies the local tensors to host memory (one copy, kept for the next save; pinned on
    GPUs) and returns. A save that is requested while one is under way waits for it. What went wrong
    in the background is raised, on all ranks and once, by the next `save`, `poll`, `wait` or
    `close`; the message has the step.

    At the end of the block, or by `close`, the save under way is waited for. When the block ends
    with KeyboardInterrupt or SystemExit it is abandoned: nothing is committed, and what has been
    written is removed. So is one that is under way when Python ends without either.

    Every rank of `group` (default: this process alone) makes one, calls the same methods in the
    same order, and communicates over gloo groups that are made here.
    """

    def __init__(self, group: Group | None = None) -> None:
        group = group or Group.single()
        self._group = group.cpu
        self._own = Group.create(
            group.ranks, name="checkpoints", backend="gloo", timeout=group.timeout
        )
        self._memory = HostMemory()
        self._plans = Plans()
        self._pending: PendingSave | None = None
        self._completed: list[PendingSave] = []
        self._thread: threading.Thread | None = None
        self._abandon: Callable[[], object] = _nothing
        self._keep: Callable[[], object] = _nothing

    @property
    def pending(self) -> PendingSave | None:
        """The save that nobody has waited for yet; None when there is none."""
        return self._pending

    def prepare(self, tensors: Mapping[str, LayoutTensor]) -> None:
        """Get the memory for saves of these tensors now, so that the first one is no slower.

        Raises:
            RuntimeError: there is not enough of it.
        """
        self._join()
        self._memory.take(tensors)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        tensors: Mapping[str, LayoutTensor],
        state: Mapping[str, Any] | None = None,
        files: Mapping[str, Path | bytes] | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        exchange_bytes: int = DEFAULT_EXCHANGE_BYTES,
        compression: str | None = None,
        file_bytes: int | None = None,
        storage: Storage | None = None,
        engine: Engine | None = None,
    ) -> PendingSave:
        """Request a checkpoint of `step`; return when tensors and state are copied.

        Arguments are those of `mcore_ckpt.save`. Attached files are read in the background, so they
        have to stay as they are. Mistakes in the arguments come to light in the background, too:
        all ranks have to hear of them.

        Raises:
            the error of the save before, if that failed and nobody has been told yet. Nothing is
                requested then.
        """
        attached = dict(files or {})

        def write(pending: PendingSave, snapshot: Snapshot, state: Any) -> Place:
            return save(
                directory,
                step=step,
                tensors=snapshot,
                state=state,
                files=attached,
                group=self._own,
                keep_last=keep_last,
                keep_every=keep_every,
                chunk_bytes=chunk_bytes,
                exchange_bytes=exchange_bytes,
                compression=compression,
                file_bytes=file_bytes,
                storage=storage,
                engine=engine,
                cancel=pending.cancel,
                plans=self._plans,
            )

        return self._request(PendingSave(step), directory, tensors, state, write)

    def save_local(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        tensors: Mapping[str, LayoutTensor],
        state: Mapping[str, Any] | None = None,
        copies: int = 1,
        host: str | None = None,
    ) -> PendingSave:
        """Request a local checkpoint of `step`, as `save` does one that all ranks share.

        Arguments are those of `mcore_ckpt.local.save_local`. The path of the save, when it is over,
        is that of `directory`. Abandoning waits for it.
        """

        def write(pending: PendingSave, snapshot: Snapshot, state: Any) -> Place:
            save_local(
                directory,
                step=step,
                tensors=snapshot,
                state=state,
                group=self._own,
                copies=copies,
                host=host,
            )
            return Path(directory)

        return self._request(PendingSave(step, is_local=True), directory, tensors, state, write)

    def _request(
        self,
        pending: PendingSave,
        directory: str | os.PathLike[str],
        tensors: Mapping[str, LayoutTensor],
        state: Mapping[str, Any] | None,
        write: Callable[[PendingSave, Snapshot, Any], Place],
    ) -> PendingSave:
        began = time.monotonic()
        self._join()
        snapshot: Snapshot = {}
        copied_state: Any = None
        failure: Exception | None = None
        try:
            copied_state = check_json({} if state is None else state)
            snapshot = self._memory.take(tensors)
        except Exception as error:  # the other ranks are told by the thread
            failure = error
        what = f"saving step {pending.step} to {os.fspath(directory)} failed, nothing was committed"

        def copied() -> None:
            if failure is not None:
                raise failure

        def job() -> Place:
            torch.set_grad_enabled(False)  # a setting of the thread
            together(self._own, what, copied)
            return write(pending, snapshot, copied_state)

        self._start(pending, job)
        pending.stalled = time.monotonic() - began
        return pending

    def poll(self) -> list[PendingSave]:
        """Return the saves that are completed on all ranks, each once; does not wait.

        Communicates over the group's CPU twin while a save is under way, and else not.

        Raises:
            the error of a save that failed.
        """
        if self._pending is not None:
            ended = torch.tensor(int(self._pending.ended))
            if not int(all_reduce(ended, self._group, op="min")):
                return self._take_completed()
        return self.wait()

    def wait(self) -> list[PendingSave]:
        """As `poll`, once the save under way is over."""
        self._join()
        return self._take_completed()

    def close(self, *, abandon: bool = False) -> None:
        """Wait for the save under way, or abandon it, and release the groups; all ranks call it.

        Raises:
            the error of that save, if it failed and was not abandoned.
        """
        pending, thread = self._pending, self._thread
        try:
            if abandon and pending is not None:
                self._abandon()
                self._forget()
            else:
                self._join()
        finally:
            if thread is None or not thread.is_alive():
                self._own.close()

    def _join(self) -> None:
        pending = self._pending
        if pending is None:
            return
        assert self._thread is not None
        self._thread.join()
        self._forget()
        pending.wait()
        self._completed.append(pending)

    def _take_completed(self) -> list[PendingSave]:
        completed, self._completed = self._completed, []
        return completed

    def _start(self, pending: PendingSave, job: Callable[[], Place]) -> None:
        # A daemon: when a peer is stuck, this process can end all the same.
        thread = threading.Thread(
            target=pending._run, args=(job,), name=f"mcore-ckpt-step-{pending.step}", daemon=True
        )
        self._pending, self._thread = pending, thread
        at_exit = weakref.finalize(self, _abandon, pending, thread)
        self._abandon, self._keep = at_exit, at_exit.detach
        thread.start()

    def _forget(self) -> None:
        self._keep()
        self._pending = self._thread = None
        self._abandon = self._keep = _nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(abandon=isinstance(error, KeyboardInterrupt | SystemExit))
        except (ValueError, OSError, RuntimeError) as other:
            error.add_note(f"besides: {other}")


def _abandon(pending: PendingSave, thread: threading.Thread) -> None:
    pending.cancel.set()
    thread.join(_PATIENCE)


def _nothing() -> None:
    """There is nothing to abandon yet."""

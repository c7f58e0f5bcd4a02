"""What every process that another one started does at its beginning and at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from multiprocessing import connection, parent_process

import torch.distributed as dist


def die_with_parent() -> None:
    """Kill this process's own process group, and so itself, as soon as its parent has gone.

    The process becomes the leader of a group first: signals of the terminal then reach it only
    through the parent, and whatever it starts goes down with it.
    """
    os.setpgrp()
    threading.Thread(target=_watch_parent, daemon=True).start()


def _watch_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only for processes started by multiprocessing"
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def kill_tree(pid: int) -> None:
    """Kill the process `pid` and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may not lead a group yet
        os.kill(pid, signal.SIGKILL)


def leave_world() -> None:
    """Close this process's connections to the other ranks, which may be gone already."""
    gc.collect()  # groups in reference cycles hold connections
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
    gc.collect()

"""What a worker process of the pool runs."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import pickle
import signal
import sys
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel import _torch
from mcore_parallel._call import Call, Filter, use_warning_filters
from mcore_parallel._failure import Failure
from mcore_parallel._process import die_with_parent, leave_world


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call in one new world. rendezvous: a file that does not exist yet."""

    number: int
    call: Call
    rank: int
    world_size: int
    rendezvous: str
    device: str
    timeout: float
    filters: list[Filter]


LEAVE = b"leave"
READY = b"ready"


def serve(pipe: Connection, stack_file: str) -> None:
    """Carry out jobs from `pipe` until it closes; SIGUSR1 writes the stack to `stack_file`.

    A rank that has succeeded stays in its world until it is told to leave: closing connections
    while another rank still reads from them could cost that rank its last bytes.
    """
    die_with_parent()
    torch.set_num_threads(1)
    imported = _freeze()
    with open(stack_file, "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        # The parent has gone or closed its end: so do we.
        with contextlib.suppress(EOFError, OSError):
            pipe.send_bytes(READY)
            while True:
                message = pipe.recv_bytes()
                if message == LEAVE:
                    leave_world()
                    if len(sys.modules) > imported:
                        imported = _freeze()
                else:
                    pipe.send_bytes(_run(pickle.loads(message)))


def _freeze() -> int:
    """Take what modules hold out of the collections around each job; the number of modules.

    Only outside of a world: connections that are in reference cycles are to be found.
    """
    gc.collect()
    gc.freeze()
    return len(sys.modules)


def _run(job: Job) -> bytes:
    try:
        with warnings.catch_warnings():
            use_warning_filters(job.filters)
            return pickle.dumps((job.number, True, _in_world(job)))
    except BaseException as error:
        reply = pickle.dumps((job.number, False, Failure.of(error, job.rank, job.world_size)))
    # The error, whose frames hold the job's groups, is gone: close its connections now, so that
    # ranks which wait for this one learn of it.
    leave_world()
    return reply


def _in_world(job: Job) -> Any:
    _reset(job.device, job.rank)
    store = _torch.file_store(job.rendezvous, job.world_size, prefix=f"job{job.number}")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if job.device == "cuda" else "gloo",
        store=store,
        rank=job.rank,
        world_size=job.world_size,
        # The pool gives up first, and says where every rank stands.
        timeout=datetime.timedelta(seconds=job.timeout + 60),
    )
    return job.call()


def _reset(device: str, rank: int) -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports the whole compiler
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.set_device(rank)

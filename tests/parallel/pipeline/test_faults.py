"""A stage that stalls, stops or dies: the others say which one and where, and nobody hangs."""

import contextlib
import datetime
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import Group
from mcore_parallel._call import Call
from mcore_parallel.collectives import send_to
from mcore_parallel.pipeline import (
    Action,
    Channel,
    PipelineError,
    interleaved,
    one_f_one_b,
    run_schedule,
    watch,
)

TIMEOUT = 2.0


def run(schedule, micro_batches, trouble):
    """Run a schedule of tiny stages; `trouble(rank, chunk, micro_batch)` before each forward."""
    pp = Group.world()

    def chunk(c):
        def stage(i, hidden):
            trouble(pp.rank, c, i)
            x = torch.ones(2, requires_grad=True) if hidden is None else hidden
            return (x * 2).sum() if pp.rank == pp.size - 1 and c == chunks - 1 else x * 2

        return stage

    chunks = schedule.line.num_chunks
    timeout = datetime.timedelta(seconds=TIMEOUT)
    with Channel(pp, timeout=timeout) as channel:
        run_schedule(
            schedule[pp.rank], [chunk(c) for c in range(chunks)], range(micro_batches), channel
        )


def what_happened(*args):
    try:
        run(*args)
    except PipelineError as error:
        return str(error)
    return "done"


def stall():
    def trouble(rank, chunk, i):
        if (rank, chunk, i) == (2, 0, 1):
            time.sleep(2.5 * TIMEOUT)

    return what_happened(one_f_one_b(4, 4), 4, trouble)


def test_a_stage_that_stalls_is_named_by_all_who_wait(ranks):
    """Through stages that wait themselves: rank 0 waits for 1, which waits for 2."""
    found = ranks.run(stall, 4)
    late = "rank 2 (stage 2) is in F of chunk 0, micro-batch 1"
    said = [line.partition(": ")[2] for line in found]
    who = [line.partition(": ")[0] for line in found]
    assert who[0] == "rank 0, pipeline stage 0, RECV_B of chunk 0, micro-batch 0"
    assert who[1] == "rank 1, pipeline stage 1, RECV_B of chunk 0, micro-batch 0"
    assert who[3] == "rank 3, pipeline stage 3, RECV_F of chunk 0, micro-batch 1"
    # Whoever gives up first closes the connections, and the others hear why.
    reasons = {f"timed out waiting 2 s: {late}", f"connection closed: {late}"}
    assert {said[0], said[1], said[3]} <= reasons
    assert f"timed out waiting 2 s: {late}" in said
    assert said[2] == f"connection closed: {late}"


def stall_in_a_later_chunk():
    def trouble(rank, chunk, i):
        if (rank, chunk, i) == (0, 1, 1):
            time.sleep(2.5 * TIMEOUT)

    return what_happened(interleaved(2, 2, chunks=2), 2, trouble)


def test_a_stall_in_a_later_chunk(ranks):
    _, second = ranks.run(stall_in_a_later_chunk, 2)
    assert second == (
        "rank 1, pipeline stage 1, RECV_F of chunk 1, micro-batch 1: timed out waiting 2 s: "
        "rank 0 (stage 0) is in F of chunk 1, micro-batch 1"
    )


def stay_away():
    if dist.get_rank() == 0:
        time.sleep(1.5 * TIMEOUT)
        return "late"
    return what_happened(one_f_one_b(2, 1), 1, lambda *_: None)


def test_a_stage_that_never_begins(ranks):
    assert ranks.run(stay_away, 2)[1] == (
        "rank 1, pipeline stage 1, RECV_F of chunk 0, micro-batch 0: timed out waiting 2 s: "
        "rank 0 (stage 0) gives no sign of life in this run"
    )


def stop_half_way():
    """Rank 0 sends the header of its first tensor, and then neither the tensor nor anything."""
    if dist.get_rank() == 1:
        return what_happened(one_f_one_b(2, 1), 1, lambda *_: None)
    send_to(torch.tensor([0, 1, 2] + [0] * 7), 1, Group.world())
    time.sleep(1.5 * TIMEOUT)
    return "late"


def test_a_message_that_stops_half_way(ranks):
    assert ranks.run(stop_half_way, 2)[1] == (
        "rank 1, pipeline stage 1, RECV_F of chunk 0, micro-batch 0: timed out waiting 2 s: "
        "rank 0 (stage 0) gives no sign of life in this run"
    )


def slow_but_sound():
    """Longer than the timeout in all, never within one wait."""
    return what_happened(one_f_one_b(2, 6), 6, lambda *_: time.sleep(0.2 * TIMEOUT))


def test_a_slow_run_is_left_alone(ranks):
    assert ranks.run(slow_but_sound, 2) == ["done", "done"]


def stop_or_die(rank, size, port, folder, how):
    """One rank in a process of its own; rank 1 stops or dies in its second forward."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def trouble(rank, chunk, i):
        if (rank, i) == (1, 1):
            os.kill(os.getpid(), getattr(signal, how))

    said = what_happened(one_f_one_b(size, 4), 4, trouble)
    Path(folder, f"rank{rank}").write_text(said)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_killed_or_stopped(tmp_path, ranks, how):
    """A pool of ranks ends with its first death, so these are processes of their own."""
    size = 3
    ranks.run(dist.get_rank, 1)  # the server that forks processes has imported torch by now
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=Call.of(stop_or_die, (rank, size, store.port, str(tmp_path), how), {})
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for rank in (0, 2):
            processes[rank].join(60)
            assert processes[rank].exitcode == 0
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
    for rank in (0, 2):
        said = (tmp_path / f"rank{rank}").read_text()
        assert said.startswith(f"rank {rank}, pipeline stage {rank}, ")
        if how == "SIGKILL":
            assert said.endswith(": connection closed: rank 1 (stage 1) is gone")
        else:
            late = "rank 1 (stage 1) gives no sign of life in this run"
            assert said.endswith((f"timed out waiting 2 s: {late}", f"connection closed: {late}"))


def test_a_store_that_hangs_is_not_waited_for(monkeypatch):
    """It goes down with the rank that serves it, and somebody has to be told all the same."""
    monkeypatch.setattr(watch, "_STORE", 0.1)
    found = watch.Watch(Channel(Group.single()))
    found._store, found._group = HangingStore(), Group(0, 2, (0, 1))
    found.doing(Action("RECV_B", 0, 0, 0), 1)
    late = "nothing from rank 1 (stage 1), nor from the store of torch.distributed"
    assert found.who_is_late(1) == late
    assert found.who_is_gone(1) == "rank 1 (stage 1) is gone"
    found.failed(late)


class HangingStore:
    def check(self, keys):
        time.sleep(30)

    def set(self, key, value):
        time.sleep(30)

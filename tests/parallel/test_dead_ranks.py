"""A rank dies or stalls in the middle of a step: the others name it and the operation, and end."""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import CollectiveError, Group, ParallelConfig, ParallelMesh, _torch, faults
from mcore_parallel._call import Call
from mcore_parallel.collectives import all_reduce, receive_into, reduce_scatter_into, send_to
from mcore_parallel.context import RingAttention
from mcore_parallel.expert import start_exchange
from mcore_parallel.testing import RankPool

SIZE = 4
VICTIM = 3
TIMEOUT = 3.0


def train(rank: int, port: int, folder: str, how: str) -> None:
    """Steps of tp 2 x dp 2 (ranks 0, 1 and 2, 3 are the tensor groups); rank 3 fails in one."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    mesh = ParallelMesh.create(ParallelConfig(tp=2, dp=2))
    assert mesh is not None
    x = torch.ones(8)
    began = time.monotonic()
    try:
        for step in range(20):
            began = time.monotonic()
            x = all_reduce(x, mesh.tp, op="max")
            if step == 10 and rank == VICTIM:
                os.kill(os.getpid(), getattr(signal, how))
            out = x.new_empty(4)
            reduce_scatter_into(out, x, mesh.dp).wait()
    except CollectiveError as error:
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - began:.1f}|{error}")
        raise SystemExit(7) from error


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_others_name_the_rank(tmp_path: Path, ranks: RankPool, how: str) -> None:
    ranks.run(dist.get_rank, 1)  # the server that forks processes has imported torch by now
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=Call.of(train, (rank, store.port, str(tmp_path), how), {}))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for rank in range(SIZE):
            if rank != VICTIM:
                processes[rank].join(60)
                assert processes[rank].exitcode == 7
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.join()
    said = {}
    for rank in (0, 1, 2):
        seconds, said[rank] = (tmp_path / f"rank{rank}").read_text().split("|")
        assert float(seconds) < TIMEOUT + 12  # no more than the inquiry on top
    if how == "SIGKILL":
        gone = "connection closed: rank 3 is gone"
    else:
        gone = "timed out: rank 3 has not come, and not failed either"
    assert said[1] == f"rank 1, reduce_scatter_into over dp (ranks 1, 3): {gone}"
    assert said[2] == f"rank 2, all_reduce over tp (ranks 2, 3): {gone}"
    # Rank 0 waits for rank 1, which waited for rank 3.
    assert said[0].startswith("rank 0, ")
    assert said[0].endswith(gone.partition(": ")[2])


def one_after_another() -> list[str]:
    """What this rank says of two faults: in the first rank 1 does not come, then rank 0."""
    said: list[str] = []
    store, me = _torch.default_store(), dist.get_rank()
    with mock.patch.dict(faults._NOTICE, {True: 0.5}):
        for absent in (1, 0):
            mesh = ParallelMesh.create(ParallelConfig(tp=2), timeout=datetime.timedelta(seconds=2))
            assert mesh is not None
            over = f"the rank that waited for {absent} has given up"
            if me == absent:
                store.wait([over], datetime.timedelta(seconds=60))
            else:
                try:
                    all_reduce(torch.ones(3), mesh.tp)
                except CollectiveError as error:
                    said.append(str(pickle.loads(pickle.dumps(error))))
                store.set(over, "1")
            mesh.close()
    return said


def test_two_faults_are_told_apart(ranks: RankPool) -> None:
    """What a rank told of the first is not taken for the reason of the second.

    Errors can be pickled.
    """
    said = (
        "rank {}, all_reduce over tp (ranks 0, 1): timed out: rank {} has not come, and not failed "
        "either"
    )
    assert ranks.run(one_after_another, 2) == [[said.format(0, 1)], [said.format(1, 0)]]


def made_without_one(absent: int) -> str | None:
    store, seconds = _torch.default_store(), datetime.timedelta(seconds=1)
    if dist.get_rank() == absent:
        store.wait(["given up 0", "given up 2"], datetime.timedelta(seconds=60))
        return None
    try:
        Group.create(range(3), name="tp", timeout=seconds)
    except CollectiveError as error:
        store.set(f"given up {dist.get_rank()}", "1")
        return str(error)
    return "made"


def test_who_does_not_come_when_a_group_is_made_is_named(ranks: RankPool) -> None:
    said = "rank {}, Group.create over tp (ranks 0, 1, 2): wait timeout: rank 1 has not come"
    assert ranks.run(made_without_one, 3, 1) == [said.format(0), None, said.format(2)]


class Lost:
    """A communication with a rank that is gone, as torch gives it."""

    def wait(self) -> None:
        raise RuntimeError("Application timeout caused pair closure")  # another message was late


def test_exchanges_under_way_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of experts and of rings, which start their messages themselves, and single ones."""

    def named(operation: str, group: Group, error: RuntimeError) -> CollectiveError:
        return CollectiveError(group.rank, operation, group.name, "gone")

    monkeypatch.setattr(faults, "_named", named)
    monkeypatch.setattr(_torch, "all_to_all_into", lambda *_, **__: Lost())
    monkeypatch.setattr(_torch, "is_alive", lambda _: True)
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: [Lost()])
    group = Group(rank=0, size=2, ranks=(0, 1), pg=mock.Mock(), name="cp")
    x, bounds = torch.ones(2, 1, 4), torch.tensor([0, 2])
    with pytest.raises(CollectiveError, match="start_exchange over cp: gone"):
        start_exchange(x, group, [1, 1], [1, 1]).wait()
    monkeypatch.setattr(dist, "isend", lambda *_, **__: Lost())
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: Lost())
    with pytest.raises(CollectiveError, match="send_to rank 1 over cp: gone"):
        send_to(x, 1, group).wait()
    with pytest.raises(CollectiveError, match="receive_into from rank 1 over cp: gone"):
        receive_into(x, 1, group).wait()
    with pytest.raises(CollectiveError, match="ring attention over cp: gone"):
        RingAttention(group)(
            x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=2, max_seqlen_k=2
        )

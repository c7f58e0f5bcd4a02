import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_parallel.testing import RankDiedError, RankHungError, RankPool


@dataclass(frozen=True)
class Point:
    x: int


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def add(point: Point, step: int = 1) -> Point:
    total = torch.tensor(float(dist.get_rank() + point.x))
    dist.all_reduce(total)
    return Point(int(total) + step)


def pid() -> int:
    return os.getpid()


def fail_on(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        time.sleep(0.2)  # the others are waiting by now
        if kind == "raise":
            raise KeyError("missing thing")
        if kind == "unpicklable":
            raise UnpicklableError("one", "two")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(3)
        if kind == "hang":
            time.sleep(600)
    dist.barrier()


def warn() -> None:
    if dist.get_rank() == 1:
        warnings.warn("old spelling", DeprecationWarning, stacklevel=1)


def fixed_state() -> tuple[float, int, bool, torch.dtype]:
    value = float(torch.rand(()))
    state = value, torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return state


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def heap_of_a_module(name: str) -> int:
    """The objects that a collection looks at, beside a module of many that was imported once."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__dict__["entries"] = [[number] for number in range(50_000)]
        sys.modules[name] = module
    gc.collect()
    return len(gc.get_objects())


def test_results_come_back_by_rank_and_worlds_vary(ranks: RankPool) -> None:
    assert ranks.run(dist.get_rank, 3) == [0, 1, 2]
    assert ranks.run(add, 2, Point(1), step=5) == [Point(8)] * 2
    assert ranks.run(add, 4, Point(0)) == [Point(7)] * 4
    assert ranks.run(add, 1, Point(4)) == [Point(5)]


def test_jobs_leave_neither_state_nor_connections_behind(ranks: RankPool) -> None:
    assert ranks.run(fixed_state, 2) == ranks.run(fixed_state, 2)
    before = ranks.run(open_files, 2)
    for _ in range(5):
        ranks.run(add, 2, Point(0))
    after = ranks.run(open_files, 2)
    assert all(b <= a + 1 for a, b in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("kind", ["raise", "unpicklable"])
def test_first_real_error_is_raised_and_the_workers_live_on(ranks: RankPool, kind: str) -> None:
    workers = ranks.run(pid, 3)
    expected = KeyError if kind == "raise" else RuntimeError
    with pytest.raises(
        expected, match=r"missing thing|rank 1 of 3: UnpicklableError: onetwo"
    ) as caught:
        ranks.run(fail_on, 3, 1, kind)
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 of 3" in notes
    assert "in fail_on" in notes
    assert ranks.run(pid, 3) == workers


def test_what_a_job_has_imported_is_not_searched_after_every_later_job(ranks: RankPool) -> None:
    first, later = (ranks.run(heap_of_a_module, 2, "module_of_many") for _ in range(2))
    assert min(most - least for most, least in zip(first, later, strict=True)) > 40_000


@pytest.mark.parametrize(("kind", "how"), [("die", "SIGKILL"), ("exit", "status 3")])
def test_death_names_the_rank_and_the_next_job_has_new_workers(
    ranks: RankPool, kind: str, how: str
) -> None:
    workers = ranks.run(pid, 2)
    with pytest.raises(RankDiedError, match=rf"rank 1 of 2 died \({how}\)"):
        ranks.run(fail_on, 2, 1, kind)
    assert not set(ranks.run(pid, 2)) & set(workers)


def crowd(threads: int) -> int:
    for _ in range(threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_workers_that_threads_of_earlier_jobs_crowd_are_replaced(ranks: RankPool) -> None:
    before = ranks.run(crowd, 2, 5)
    assert ranks.run(crowd, 2, 200) == before
    assert not set(ranks.run(crowd, 2, 0)) & set(before)


def test_hang_names_the_ranks_and_shows_where_they_stand(ranks: RankPool) -> None:
    workers = ranks.run(pid, 3)
    with pytest.raises(
        RankHungError, match=r"ranks 0, 1, 2 of 3 did not finish within 2 s"
    ) as info:
        ranks.run(fail_on, 3, 1, "hang", timeout=2)
    stacks = dict(zip(range(3), info.value.__notes__, strict=True))
    assert "in barrier" in stacks[0]
    assert "barrier" not in stacks[1]
    assert "in fail_on" in stacks[1]
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    assert ranks.run(dist.get_rank, 2) == [0, 1]


def test_warnings_of_a_rank_follow_the_filters_of_the_caller(ranks: RankPool) -> None:
    with pytest.raises(DeprecationWarning, match="old spelling") as caught:
        ranks.run(warn, 2)
    assert "rank 1 of 2" in caught.value.__notes__[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "old sp", DeprecationWarning)
        assert ranks.run(warn, 2) == [None, None]


def test_what_cannot_be_sent_is_rejected_before_anything_runs(ranks: RankPool) -> None:
    def local() -> None: ...

    with pytest.raises(ValueError, match=r"local.* top level of its module"):
        ranks.run(local, 2)
    most = ranks.max_ranks
    for size in (0, most + 1):
        with pytest.raises(ValueError, match=rf"{size} ranks: this pool has 1 to {most} of them"):
            ranks.run(pid, size)


def sum_on_both_devices() -> tuple[int, float, float]:
    place = torch.cuda.current_device()
    values = [torch.ones(2, device="cuda"), torch.ones(2)]
    for value in values:
        dist.all_reduce(value)
    return place, float(values[0].sum()), float(values[1].sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_on_gpus_have_one_each(ranks: RankPool) -> None:
    size = min(2, torch.cuda.device_count())
    expected = [(rank, 2.0 * size, 2.0 * size) for rank in range(size)]
    assert ranks.run(sum_on_both_devices, size, device="cuda") == expected


DOWNSTREAM = """
import torch.distributed as dist

class Mine:
    def __init__(self, value):
        self.value = value

def double(given):
    return Mine(given.value * 2 + dist.get_rank())

def test_my_library(ranks):
    assert [mine.value for mine in ranks.run(double, 2, Mine(3))] == [6, 7]
"""


def test_fixture_serves_a_project_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from mcore_parallel.testing.plugin import ranks", encoding="utf-8"
    )
    (tmp_path / "test_mine.py").write_text(DOWNSTREAM, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


SCRIPT = """
import os, sys, time
from mcore_parallel.testing import RankPool

def names() -> int:
    return os.getpid()

def wait(folder: str) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(names, 2), flush=True)
    if len(sys.argv) > 1:
        pool.run(wait, 2, sys.argv[1])
"""


def test_workers_end_with_their_parent_even_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    started = tmp_path / "started"
    started.mkdir()
    command = [sys.executable, str(script), str(started)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        while len(list(started.iterdir())) < 2:
            time.sleep(0.05)
        parent.kill()
    wait_until_gone(workers)


def wait_until_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 20
    while any(Path(f"/proc/{p}").exists() for p in pids):
        assert time.monotonic() < limit, f"{pids} are still there"
        time.sleep(0.05)

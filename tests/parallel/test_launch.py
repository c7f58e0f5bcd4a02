import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_parallel import Group, RankDiedError, all_reduce
from mcore_parallel.launch import init_from_env, launch_local
from mcore_parallel.testing import RankPool

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def total(factor: int) -> tuple[int, int, int]:
    group = Group.world()
    value = all_reduce(torch.tensor(factor * (group.rank + 1)), group)
    return group.rank, int(value), torch.get_num_threads()


def leave_pid(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()


def fail(folder: str, kind: str) -> None:
    leave_pid(folder)
    rank = dist.get_rank()
    if rank == 1 and kind == "raise":
        raise LookupError("no such corpus")
    if rank == 1 and kind == "exit":
        raise SystemExit(2)
    if rank == 1 and kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait(folder: str, kind: str) -> str:
    """Wait for the signal, and then return, ignore it, fail, or die of it."""
    caught: list[int] = []
    if kind != "die":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: caught.append(number))
    subprocess.Popen(["sleep", "600"])  # something that must not stay behind
    leave_pid(folder)
    while not caught or kind == "ignore":
        time.sleep(0.02)
    if kind == "fail":
        raise OSError("disk full while stopping")
    return signal.Signals(caught[0]).name


def pids(folder: Path) -> list[int]:
    return [int(entry.name) for entry in folder.iterdir()]


def in_group(leader: int) -> list[int]:
    """Return the living processes of the process group that `leader` leads or led."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(leaders: list[int]) -> None:
    """Require that these processes and all that they started end soon."""
    limit = time.monotonic() + 20
    while left := [process for leader in leaders for process in in_group(leader)]:
        assert time.monotonic() < limit, f"{left} are still there"
        time.sleep(0.05)


@contextmanager
def signal_when_started(folder: Path, count: int, *signals: int) -> Iterator[None]:
    """Send this process `signals`, half a second apart, once `count` ranks have left their pid."""

    def send() -> None:
        limit = time.monotonic() + 60
        while len(pids(folder)) < count and time.monotonic() < limit:
            time.sleep(0.02)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_results_come_back_by_rank() -> None:
    share = max(1, (os.cpu_count() or 1) // 2)
    assert launch_local(total, 2, 10) == [(0, 30, share), (1, 30, share)]
    assert launch_local(total, 1, 10, threads=1) == [(0, 10, 1)]
    with pytest.raises(ValueError, match="nproc must be at least 1, not 0"):
        launch_local(total, 0, 10)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("raise", LookupError, "no such corpus"),
        ("exit", SystemExit, "2"),
        ("die", RankDiedError, r"rank 1 of 3 died \(SIGKILL\)"),
    ],
)
def test_first_real_error_is_raised_and_nothing_stays(
    tmp_path: Path, kind: str, error: type[BaseException], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        launch_local(fail, 3, str(tmp_path), kind)
    assert "rank 1 of 3" in caught.value.__notes__[0]
    assert len(pids(tmp_path)) >= 1
    wait_until_gone(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_every_rank_which_may_end_in_order(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(number)
    with signal_when_started(tmp_path, 2, number):
        names = launch_local(wait, 2, str(tmp_path), "return")
    assert names == [signal.Signals(number).name] * 2
    assert signal.getsignal(number) is before
    wait_until_gone(pids(tmp_path))


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_signal_that_ends_the_ranks_is_told_to_the_caller(
    tmp_path: Path, number: int, error: type[BaseException]
) -> None:
    with signal_when_started(tmp_path, 2, number), pytest.raises(error) as caught:
        launch_local(wait, 2, str(tmp_path), "die")
    if number == signal.SIGTERM:
        assert caught.value.code == 143  # type: ignore[attr-defined]
    wait_until_gone(pids(tmp_path))


def test_error_while_stopping_is_not_hidden_by_the_signal(tmp_path: Path) -> None:
    with (
        signal_when_started(tmp_path, 2, signal.SIGTERM),
        pytest.raises(OSError, match="disk full while stopping"),
    ):
        launch_local(wait, 2, str(tmp_path), "fail")


@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, signals: tuple[int, ...]) -> None:
    """After the grace period, or at the second signal."""
    grace = 0.5 if len(signals) == 1 else 600
    with (
        signal_when_started(tmp_path, 2, *signals),
        pytest.raises((KeyboardInterrupt, SystemExit)),
    ):
        launch_local(wait, 2, str(tmp_path), "ignore", stop_grace=grace)
    wait_until_gone(pids(tmp_path))


SCRIPT = """
import sys
from tests_launch_functions import wait
from mcore_parallel.launch import launch_local

if __name__ == "__main__":
    launch_local(wait, 2, sys.argv[1], "ignore")
"""


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    (tmp_path / "tests_launch_functions.py").write_text(
        Path(__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    with subprocess.Popen([sys.executable, "script.py", str(started)], cwd=tmp_path) as launcher:
        limit = time.monotonic() + 120
        while len(pids(started)) < 2 and launcher.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        launcher.kill()
    assert len(pids(started)) == 2
    wait_until_gone(pids(started))


LOADED = """
import sys
before = "wave" in sys.modules
import wave

def seen():
    return before, "wave" in sys.modules

if __name__ == "__main__":
    from mcore_parallel.launch import launch_local
    import loaded
    print(launch_local(loaded.seen, 2, preload=["wave", "nothing_of_the_kind"]))
"""


def test_modules_are_imported_once_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(LOADED, encoding="utf-8")
    command = [sys.executable, "loaded.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "[(True, True), (True, True)]\n"


def join_from_env(port: int) -> tuple[int, int, int, str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    already = init_from_env(device="cpu")
    assert (already.rank, already.world_size, already.local_rank) == (rank, size, rank)
    dist.destroy_process_group()
    values = (str(rank), str(size), str(rank), "127.0.0.1", str(port))
    os.environ.update(zip(VARIABLES, values, strict=True))
    try:
        place = init_from_env(device="cpu")
        assert int(all_reduce(torch.tensor(1), Group.world())) == size
    finally:
        for name in VARIABLES:
            del os.environ[name]
    return place.rank, place.world_size, place.local_rank, str(place.device)


def test_joins_the_world_of_the_environment(ranks: RankPool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert ranks.run(join_from_env, 2, port) == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]


def test_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    place = init_from_env(device="cpu")
    assert (place.rank, place.world_size, place.local_rank) == (0, 1, 0)
    assert not dist.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE are set but LOCAL_RANK, MASTER_ADDR"):
        init_from_env(device="cpu")
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK=2 is not in a world of WORLD_SIZE=2"):
        init_from_env(device="cpu")
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK='one' is not a whole number"):
        init_from_env(device="cpu")


def on_gpu() -> tuple[int, int, str, float]:
    place = init_from_env()  # the world exists already
    value = torch.ones(3, device=place.device)
    dist.all_reduce(value)
    return place.rank, place.world_size, str(place.device), float(value.sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_rank_has_its_own_gpu() -> None:
    size = min(2, torch.cuda.device_count())
    expected = [(rank, size, f"cuda:{rank}", 3.0 * size) for rank in range(size)]
    assert launch_local(on_gpu, size, device="cuda") == expected


def test_more_ranks_than_gpus_are_rejected() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"nproc = {count + 1} is more than the {count} GPUs"):
        launch_local(on_gpu, count + 1, device="cuda")


TORCHRUN = """
import os

import torch
from mcore_parallel import Group, RankDiedError, all_reduce
from mcore_parallel.launch import init_from_env

place = init_from_env(device="cpu")
total = all_reduce(torch.tensor(place.rank + 1), Group.world())
# One write each: two of them may otherwise mix.
os.write(1, f"rank {place.rank} of {place.world_size}: {int(total)}\\n".encode())
torch.distributed.destroy_process_group()
"""


def test_works_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines())[-2:] == ["rank 0 of 2: 3", "rank 1 of 2: 3"]

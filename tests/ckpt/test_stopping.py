"""Commands that are asked to stop, by Ctrl-C or SIGTERM: soon, in one line, nothing half done."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import mcore_ckpt
from mcore_ckpt.cli import main
from mcore_ckpt.default_engine import DefaultEngine
from mcore_ckpt.engine import Writing
from mcore_ckpt.sinks import CheckpointSink
from mcore_ckpt.stopping import Stopped, raising_on_sigterm
from mcore_parallel.layout import LayoutTensor, TensorLayout
from mcore_parallel.mapping import TensorMeta

# Imports torch once; runs each command in a process of its own, which says when it is in the middle
# of its work and then goes on slowly.
SERVER = """
import itertools, json, os, sys, time
import mcore_ckpt.averaging, mcore_ckpt.convert, mcore_ckpt.dcp.sink, mcore_ckpt.pruning
import mcore_ckpt.rewriting, mcore_ckpt.verifying
from mcore_ckpt.cli import main

def slow(owner, name, after, pause):
    before, calls = getattr(owner, name), itertools.count(1)
    def run(*args, **options):
        result = before(*args, **options)
        call = next(calls)  # several threads call it
        with open(sys.argv[1], "a") as file:
            file.write(f"{name}\\n")
        if call == after:
            os.write(to_test, b"working\\n")
        if call >= after:
            time.sleep(pause)
        return result
    setattr(owner, name, run)

for line in sys.stdin:
    arguments, errors = json.loads(line)
    child = os.fork()
    if not child:
        to_test = os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 0)
        slow(mcore_ckpt.sinks.CheckpointSink, "write", 2, 60)
        slow(mcore_ckpt.dcp.sink.DcpSink, "write", 2, 60)
        slow(mcore_ckpt.pruning, "remove_checkpoint", 1, 60)
        slow(mcore_ckpt.verifying, "check_chunk", 20, 2)
        sys.exit(main(arguments))
    print("pid", child, flush=True)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def save(directory: Path, *steps: int) -> None:
    layouts = {name: TensorLayout.whole(f"model/{name}", (150, 40)) for name in "abcdef"}
    for step in steps:
        mcore_ckpt.save(
            directory,
            step=step,
            tensors={
                name: LayoutTensor(torch.full(layout.shape, float(step)), layout)
                for name, layout in layouts.items()
            },
            state={"config": {"model": {"size": 40}}},
            chunk_bytes=1600,
        )


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in files}


class Commands:
    """Runs commands and sends them signals in the middle of their work.

    errors: what the last one said. calls: what of its work it did.
    """

    def __init__(self, folder: Path) -> None:
        self.errors, self.calls = folder / "errors", folder / "calls"
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(self.calls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def stop(self, arguments: list[str], number: int) -> tuple[int, str, float]:
        """Return exit status, what was said, and the seconds from the signal to the end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for file in (self.errors, self.calls):
            file.write_text("")
        self.process.stdin.write(json.dumps([arguments, str(self.errors)]) + "\n")
        self.process.stdin.flush()
        lines = sorted(self._line().split() for _ in range(2))
        assert [line[0] for line in lines] == ["pid", "working"]
        begun = time.monotonic()
        os.kill(int(lines[0][1]), number)
        status = int(self._line().removeprefix("status "))
        return status, self.errors.read_text(), time.monotonic() - begun

    def _line(self) -> str:
        assert self.process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(
            target=lambda: lines.append(self.process.stdout.readline()), daemon=True
        )
        reader.start()
        reader.join(60)
        if not lines:
            self.process.kill()
            pytest.fail("the command has said nothing for a minute")
        return lines[0]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            assert self.process.wait(60) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("stopping"))
    yield made
    made.close()


def sample(run: str, new: str) -> dict[str, list[str]]:
    return {
        "verify": ["verify", run],
        "reshard": ["reshard", run, new],
        "average": ["average", run, run, "--to", new],
        "convert": ["convert", "--from", "native", run, "--to", "dcp", new],
        "prune": ["prune", run, "--keep-last", "1"],
    }


@pytest.mark.parametrize("which", sample("", ""))
def test_a_command_stops_soon_and_can_be_run_again(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    save(run, 1, 2)
    command = sample(str(run), str(new))[which]
    before = contents(run)
    number = signal.SIGINT if which in ("average", "convert") else signal.SIGTERM
    status, said, seconds = commands.stop(command, number)
    what = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert said == f"mcore-ckpt: {what}; what was half-written is no checkpoint\n"
    assert status == 128 + number
    assert seconds < 30
    if which == "verify":  # of 90 chunks those that were under way, and none that was waiting
        assert 20 <= len(commands.calls.read_text().splitlines()) <= 60
    if which == "prune":
        assert mcore_ckpt.latest(run) == run / "step_00000002"
    else:
        assert contents(run) == before
        assert contents(tmp_path) == before
    with pytest.raises(FileNotFoundError):
        mcore_ckpt.open(new)
    assert main(command) == 0
    if new.exists() and which != "convert":
        assert mcore_ckpt.open(new)["model/f"].eq(2).all()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0


class Interrupted(DefaultEngine):
    """An interrupt comes while chunks are under way: they are only there when waited for again."""

    def write(self, storage: Any, chunks: Any) -> Writing:
        engine, waited, held = super(), [], list(chunks)

        class Slow:
            def wait(self) -> Any:
                waited.append(None)
                if len(waited) == 1:
                    raise KeyboardInterrupt
                return engine.write(storage, held).wait()

        return Slow()


@pytest.mark.parametrize("scheme", ["memory://", ""])
def test_what_is_under_way_is_waited_for_before_it_is_removed(tmp_path: Path, scheme: str) -> None:
    place = f"{scheme}{tmp_path}/run"
    meta = {"x": TensorMeta((4, 4), torch.float32)}
    with (
        pytest.raises(KeyboardInterrupt),
        CheckpointSink(place, meta, engine=Interrupted()) as sink,
    ):
        sink.write("x", torch.ones(4, 4))
    assert not list(tmp_path.rglob("*c.0.0"))
    assert not fsspec.filesystem("memory").find(str(tmp_path))


def test_a_program_around_that_handles_the_signal_keeps_it() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with raising_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(Stopped, match="SIGTERM"), raising_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

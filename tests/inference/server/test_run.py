"""How a server begins and ends: readiness, draining by real signals, errors of the command."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_data import ByteTokenizer
from mcore_inference.cli import main
from mcore_inference.server import address, bind, serve
from mcore_models import ModelConfig, build_model
from mcore_parallel import RngKey

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from scripted import ScriptedRunner, scripted
from small_models import LLAMA, save_checkpoint


class Client:
    """One connection to a server."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        self.connection.request(method, path, body=body and json.dumps(body).encode())
        response = self.connection.getresponse()
        return response.status, json.loads(response.read())


class Stream:
    """An answer that comes piece by piece, on a connection of its own."""

    def __init__(self, port: int, **more: object) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "m", "prompt": "a", "max_tokens": 6, "temperature": 0, "stream": True}
        data = json.dumps({**body, **more}).encode()
        self.connection.request("POST", "/v1/completions", body=data)
        self.response = self.connection.getresponse()
        self.first = self.response.readline()

    def rest(self) -> tuple[str, str]:
        """The text after the first event, and the last event."""
        lines = self.response.read().decode().split()
        self.connection.close()
        events = [line for line in "".join(lines).split("data:") if line]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        texts = [chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk]
        return "".join(texts), events[-1]


def served(
    client: Callable[[int, ScriptedRunner], None], config: ModelConfig = LLAMA, **options: float
) -> tuple[int, list[str]]:
    """Serve in this thread, with `client` in another; the exit status, and what was said.

    The model says `hello!`; each of its steps waits for its turn.
    """
    llm, runner = scripted(config, ByteTokenizer(), {(97,): b"hello!"})
    runner.turns = threading.Semaphore(0)
    said: list[str] = []
    errors: list[BaseException] = []
    bound = bind("127.0.0.1", 0)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    port = bound.getsockname()[1]

    def play() -> None:
        try:
            client(port, runner)
        except BaseException as error:
            errors.append(error)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            assert runner.turns is not None
            runner.turns.release(10_000)

    player = threading.Thread(target=play)

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            player.start()

    status = serve(llm, bound, name="m", say=say, **options)  # type: ignore[arg-type]
    player.join()
    if errors:
        raise errors[0]
    assert llm.engine._cache.num_slots == 0
    return status, said


def test_a_signal_lets_those_under_way_finish_and_takes_no_others() -> None:
    def client(port: int, runner: ScriptedRunner) -> None:
        assert runner.turns is not None
        other = Client(port)
        assert other.ask("GET", "/health") == (200, {"status": "ok"})
        runner.turns.release(2)
        stream = Stream(port)
        assert b'"text":"h"' in stream.first
        os.kill(os.getpid(), signal.SIGTERM)
        while other.ask("GET", "/health")[0] == 200:
            pass
        assert other.ask("GET", "/health") == (503, {"status": "draining"})
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        status, answer = other.ask("POST", "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert answer["error"]["type"] == "service_unavailable_error"
        runner.turns.release(9)
        assert stream.rest() == ("ello!", "[DONE]")
        other.connection.close()

    status, said = served(client)
    assert status == 0
    assert re.fullmatch(r"mcore-inference: serving m at http://127\.0\.0\.1:\d+", said[0])
    assert said[1:] == ["mcore-inference: draining, requests under way: 1"]


@pytest.mark.parametrize("how", ["a second signal", "the time"])
def test_those_that_do_not_finish_are_ended(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    def client(port: int, runner: ScriptedRunner) -> None:
        assert runner.turns is not None
        runner.turns.release(2)
        stream = Stream(port)
        assert b'"text":"h"' in stream.first
        os.kill(os.getpid(), signal.SIGINT if how == "the time" else signal.SIGTERM)
        if how == "a second signal":
            other = Client(port)
            while other.ask("GET", "/health")[0] == 200:
                pass
            other.connection.close()
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.3, runner.turns.release).start()  # the step that is under way
        text, last = stream.rest()
        assert text in ("", "e", "el")
        assert json.loads(last)["error"] == {
            "message": "theserverhasshutdown",
            "type": "service_unavailable_error",
            "param": None,
            "code": "shut_down",
        }

    status, _ = served(client, drain_timeout=60 if how == "a second signal" else 0.05)
    assert status == 1
    assert capsys.readouterr().err == "mcore-inference: requests not finished: 1\n"


def test_a_body_that_never_comes_to_its_end_holds_nothing_up() -> None:
    def client(port: int, runner: ScriptedRunner) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as half:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-length: 500\r\n\r\n"
            half.sendall(head + b'{"model": ')
            other = Client(port)
            other.connection.request("HEAD", "/health")
            assert other.connection.getresponse().status == 200  # and the half has been read
            other.connection.close()
            os.kill(os.getpid(), signal.SIGTERM)
            answer = http.client.HTTPResponse(half)
            answer.begin()
            assert answer.status == 503
            assert json.loads(answer.read())["error"]["code"] == "draining"

    assert served(client)[0] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_reads_is_cut_off_and_told(
    stream: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    slow = socket.socket()

    def client(port: int, runner: ScriptedRunner) -> None:
        assert runner.turns is not None
        runner.turns.release(10_000)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        prompt = "a" * 8_000  # each choice gives it back: more than all buffers hold
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "echo": True, "n": 32}
        data = json.dumps({**body, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-length: %d\r\n\r\n"
        slow.sendall(head % len(data) + data)
        assert slow.recv(8) == b"HTTP/1.1"  # the answer is on its way
        os.kill(os.getpid(), signal.SIGTERM)

    with slow:
        status, _ = served(client, replace(LLAMA, max_positions=8_000), drain_timeout=1)
    assert status == 1
    assert "mcore-inference: not all answers were read to their end" in capsys.readouterr().err
    assert not any(record.exc_info for record in caplog.records)


def test_with_nothing_under_way_it_ends_at_once() -> None:
    status, said = served(lambda port, runner: os.kill(os.getpid(), signal.SIGTERM))
    assert status == 0
    assert said[1:] == ["mcore-inference: draining, requests under way: 0"]


def test_addresses() -> None:
    with bind("127.0.0.1", 0) as bound, socket.socket() as taken:
        assert address(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            bind(*bound.getsockname())
        with pytest.raises(OSError, match=rf"^cannot listen at 127\.0\.0\.1 port {port}: "):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match=r"^cannot listen at nowhere\.invalid port 1: "):
        bind("nowhere.invalid", 1)
    if socket.has_ipv6:
        try:
            bound = bind("::1", 0)
        except OSError:
            return  # built in, and not to be had here
        with bound:
            assert address(bound) == f"http://[::1]:{bound.getsockname()[1]}"


@pytest.mark.slow
def test_the_command_serves_a_checkpoint_and_drains(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    model = build_model(LLAMA, key=RngKey(3))
    save_checkpoint(model, folder)
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    command = [sys.executable, "-W", "error", "-m", "mcore_inference", "serve", "--port", "0"]
    command += ["--checkpoint", str(folder), "--chat-template", str(tmp_path / "t.jinja")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"mcore-inference: serving (\w+) at http://127\.0\.0\.1:(\d+)\n", line)
        assert found, process.stderr.read()
        name, port = found[1], int(found[2])
        assert name == "checkpoints"
        client = Client(port)
        asked = {"model": name, "temperature": 0, "max_tokens": 8}
        _, text = client.ask("POST", "/v1/completions", {**asked, "prompt": "hello"})
        messages = [{"role": "user", "content": "hello"}]
        _, chat = client.ask("POST", "/v1/chat/completions", {**asked, "messages": messages})
        assert text["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
        stream = Stream(port, model=name, max_tokens=300, ignore_eos=True)
        assert stream.first.startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        assert stream.rest()[1] == "[DONE]"
        client.connection.close()
        assert process.wait(60) == 0
        said = process.stdout.read()
        assert re.fullmatch(r"mcore-inference: draining, requests under way: [01]\n", said)
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port 70000 must lie in 0 to 65535"),
        (["--drain-timeout", "-1"], "--drain-timeout -1.0 must be at least 0"),
        (["--drain-timeout", "nan"], "--drain-timeout nan must be at least 0"),
        (["--max-waiting", "-1"], "--max-waiting -1 must be at least 0"),
        (["--port", "0"], f"no committed checkpoint at {Path.cwd() / 'nowhere'}"),
        (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid port 8000: "),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--checkpoint", "nowhere", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"mcore-inference: {message}")
    assert err.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", "--checkpoint", "nowhere"]) == 2
    message = "serve needs fastapi: pip install 'mcore-inference[server]'"
    assert capsys.readouterr().err == f"mcore-inference: {message}\n"

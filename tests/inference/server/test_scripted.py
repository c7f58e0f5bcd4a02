"""What comes out when it is known what the model says, and when it says it."""

import http.client
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from live import NAME, Live, live
from scripted import Pieces, ScriptedRunner, scripted
from small_models import LLAMA

from mcore_data import ByteTokenizer, ChatTemplate

PIECES = Pieces("p", "DEF", "G", "HI", "J", "K")
BASE: dict[str, Any] = {"model": NAME, "temperature": 0}


def texts(chunks: list[Any]) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk in chunks]


def ends(chunks: list[Any]) -> list[str]:
    """The finish reasons; only the last chunk may have one."""
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert set(reasons[:-1]) <= {None}
    return reasons[-1:]


@pytest.fixture(scope="module")
def pieces() -> Iterator[Live]:
    scripts = {(0,): [1, 2, 3, 4], (0, 0): [1, 2, 3, 5, 256]}
    llm, _ = scripted(LLAMA, PIECES, scripts)
    with live(llm) as server:
        yield server


def test_stop_strings_over_several_tokens(pieces: Live) -> None:
    """U52: nothing of DEF, G, HI, J is shown; K in place of J frees all seven characters."""
    body = {**BASE, "max_tokens": 9, "stop": ["never", "DEFGHIJ"]}
    chunks = pieces.events("/v1/completions", {**body, "prompt": [0]})
    assert (texts(chunks), ends(chunks)) == ([""], ["stop"])
    twin = pieces.events("/v1/completions", {**body, "prompt": [0, 0]})
    assert (texts(twin), ends(twin)) == (["DEFGHIK", ""], ["stop"])
    cut = pieces.events("/v1/completions", {**body, "prompt": [0], "max_tokens": 3})
    assert ("".join(texts(cut)), ends(cut)) == ("DEFGHI", ["length"])
    inside = pieces.events("/v1/completions", {**body, "prompt": [0], "stop": "FGH"})
    assert ("".join(texts(inside)), ends(inside)) == ("DE", ["stop"])
    for asked, text in (({"stop": "FGH"}, "DE"), ({}, "")):
        status, answer = pieces.ask("POST", "/v1/completions", {**body, "prompt": [0], **asked})
        assert (status, answer["choices"][0]["text"]) == (200, text)
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_log_probabilities_of_held_back_tokens_come_with_their_text(pieces: Live) -> None:
    body = {**BASE, "prompt": [0], "max_tokens": 9, "stop": "GHIJ", "logprobs": 0}
    chunks = pieces.events("/v1/completions", body)
    tokens = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert texts(chunks) == ["DEF", ""]
    assert tokens == [["DEF"], ["G", "HI", "J"]]
    assert offsets == [[0], [3, 3, 3]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_characters_of_several_bytes(path: str) -> None:
    """U54: one ď, no replacement character, and one last chunk with its reason."""
    prompt = tuple(b"user: p\nassistant:")
    tokenizer = ByteTokenizer()
    scripts = {prompt: [0xC4, 0x8F, 256], (*prompt, 32): [*"🐈".encode()] * 3}
    llm, _ = scripted(LLAMA, tokenizer, scripts)
    spaced = "{% for m in messages %}user: {{ m.content }}\nassistant:{% endfor %}"
    llm.chat_template = ChatTemplate(spaced)
    with live(llm) as server:
        for number, (content, more, expected, reason) in enumerate(
            [
                ("p", {}, "ď", "stop"),
                ("p", {"max_tokens": 2}, "ď", "length"),
                ("p", {"max_tokens": 1}, "", "length"),
                ("p\nassistant: ", {"max_tokens": 10}, "🐈🐈", "length"),
            ]
        ):
            chat = [{"role": "user", "content": content}]
            asked: dict[str, Any] = {"messages": chat}
            if number == 3:
                llm.chat_template = ChatTemplate("user: p\nassistant: ")
            if path == "/v1/completions":
                text = "user: p\nassistant: " if number == 3 else "user: p\nassistant:"
                asked = {"prompt": text}
            chunks = server.events(path, {**BASE, "max_tokens": 9, **asked, **more})
            got = [
                choice.get("text", choice.get("delta", {}).get("content", ""))
                for choice in (chunk["choices"][0] for chunk in chunks)
            ]
            assert "".join(got) == expected
            assert [len(text) for text in got if text] == [1] * len(expected)
            assert ends(chunks) == [reason]


@pytest.fixture
def gated() -> Iterator[tuple[Live, ScriptedRunner]]:
    """A server whose every step waits for its turn; two requests run, one waits."""
    llm, runner = scripted(LLAMA, ByteTokenizer(), {(97,): b"hello"}, max_sequences=2)
    runner.turns = threading.Semaphore(0)
    with live(llm, max_waiting=1) as server:
        try:
            yield server, runner
        finally:
            runner.turns.release(10_000)


def start(server: Live, path: str = "/v1/completions", **body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    asked = {**BASE, "prompt": "a", "max_tokens": 2000, "ignore_eos": True, **body}
    connection.request("POST", path, body=json.dumps(asked).encode())
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_work(
    gated: tuple[Live, ScriptedRunner], stream: bool
) -> None:
    server, runner = gated
    engine = server.engine
    assert runner.turns is not None
    running, waiting = start(server, stream=stream), start(server, stream=stream)
    third = start(server, stream=stream)
    server.wait_until(lambda: engine.num_under_way == 3)
    runner.turns.release(3)
    server.wait_until(lambda: runner.passes == 3)
    assert engine.engine._cache.num_slots > 1999
    if stream:
        response = running.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b'data: {"id":"cmpl-')
        response.close()
    for connection in (running, waiting, third):
        connection.close()
    server.wait_until(lambda: len(engine._dropped) == 3 or engine.num_under_way == 0)
    runner.turns.release(1000)
    server.wait_until(lambda: engine.num_under_way == 0)
    assert engine.engine._cache.num_slots == 0
    passes = runner.passes
    assert passes <= 5  # the one under way while they left
    assert server.ask("POST", "/v1/completions", {**BASE, "prompt": "a", "max_tokens": 5})[0] == 200
    assert runner.passes == passes + 5


def test_more_than_may_wait_are_refused(gated: tuple[Live, ScriptedRunner]) -> None:
    server, runner = gated
    assert runner.turns is not None
    held = [start(server, max_tokens=2) for _ in range(3)]
    server.wait_until(lambda: server.engine.num_under_way == 3)
    status, answer = server.ask("POST", "/v1/completions", {**BASE, "prompt": "a"})
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert "1 more requests do not fit: 3 of at most 3" in answer["error"]["message"]
    assert server.ask("GET", "/health")[0] == 200
    runner.turns.release(20)
    for connection in held:
        assert connection.getresponse().status == 200
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_fails_is_an_error_of_the_server_which_lives_on(
    gated: tuple[Live, ScriptedRunner], stream: bool
) -> None:
    server, runner = gated
    assert runner.turns is not None
    runner.error = FloatingPointError("logits are not finite")
    runner.turns.release(20)
    body = {**BASE, "prompt": "a", "max_tokens": 3}
    if stream:
        answer = server.events("/v1/completions", body)[-1]
    else:
        status, answer = server.ask("POST", "/v1/completions", body)
        assert status == 500
    assert answer["error"]["message"] == "FloatingPointError: logits are not finite"
    assert (answer["error"]["type"], answer["error"]["code"]) == (
        "server_error",
        "generation_failed",
    )
    assert server.ask("POST", "/v1/completions", body)[0] == 200


def test_the_official_client_raises_an_error_within_a_stream(
    gated: tuple[Live, ScriptedRunner],
) -> None:
    server, runner = gated
    assert runner.turns is not None
    with server.client() as client:
        stream = client.completions.create(
            model=NAME, prompt="a", max_tokens=9, temperature=0, stream=True
        )
        runner.turns.release(1)
        assert next(stream).choices[0].text == "h"
        runner.error = RuntimeError("broken")
        runner.turns.release(9)
        with pytest.raises(openai.APIError, match="RuntimeError: broken"):
            list(stream)


def test_tokens_that_the_tokenizer_has_not_are_a_bad_request() -> None:
    llm, _ = scripted(replace(LLAMA, vocab_size=300), ByteTokenizer(), {})
    with live(llm) as server:
        for echo in (False, True):
            body = {**BASE, "prompt": [97, 280], "echo": echo}
            status, answer = server.ask("POST", "/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, "prompt")
            assert "id 280 lies outside the 257" in answer["error"]["message"]


def test_templates_that_refuse_are_a_bad_request(pieces: Live) -> None:
    llm, runner = scripted(LLAMA, ByteTokenizer(), {})
    llm.chat_template = ChatTemplate("{{ raise_exception('no system') }}")
    with live(llm) as server:
        chat = {**BASE, "messages": [{"role": "system", "content": "x"}]}
        status, answer = server.ask("POST", "/v1/chat/completions", chat)
        assert (status, answer["error"]["message"]) == (400, "chat template: no system")
        assert answer["error"]["param"] == "messages"
        llm.chat_template = ChatTemplate("{{ messages.__class__ }}")
        status, answer = server.ask("POST", "/v1/chat/completions", chat)
        assert status == 400
        assert "unsafe" in answer["error"]["message"]
    assert runner.passes == 0

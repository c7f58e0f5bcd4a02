"""A server at a real port: through the official client, and with what that client cannot send."""

import http.client
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from mcore_data import ByteTokenizer
from mcore_inference import LLM, Completion, SamplingParams
from mcore_inference.server.protocol import CompletionBody, parse
from mcore_models import build_model
from mcore_parallel import RngKey

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from live import NAME, Live, live
from small_models import LLAMA, PROMPTS

LIMIT = 60
CHAT: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
CHAT_TEXT = "system: be brief\nuser: hello\nassistant:"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The model, to be asked directly; not the one behind the server, whose engine is in use."""
    return LLM(build_model(replace(LLAMA, max_positions=LIMIT), key=RngKey(3)), ByteTokenizer())


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Live]:
    with live(LLM(llm.model, ByteTokenizer(), max_sequences=6), max_waiting=14) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def greedy(llm: LLM, prompt: Any, tokens: int = 8, **params: Any) -> Completion:
    return llm.generate([prompt], SamplingParams(max_tokens=tokens, **params))[0]


def test_models_and_health(client: openai.OpenAI, server: Live) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (NAME, "model")
    assert client.models.retrieve(NAME) == model
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    with pytest.raises(openai.NotFoundError, match="'other' does not exist: this server has"):
        client.models.retrieve("other")


def test_while_a_long_body_is_read_others_are_answered(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, answered = threading.Event(), threading.Event()

    def parse_slowly(kind: type[CompletionBody], body: bytes) -> CompletionBody:
        reading.set()
        assert answered.wait(60)
        return parse(kind, body)

    monkeypatch.setattr("mcore_inference.server.app.parse", parse_slowly)
    with ThreadPoolExecutor(1) as pool:
        body = {"model": NAME, "prompt": "a", "max_tokens": 1}
        slow = pool.submit(server.ask, "POST", "/v1/completions", body)
        assert reading.wait(60)
        try:
            assert server.ask("GET", "/health") == (200, {"status": "ok"})
        finally:
            answered.set()
        assert slow.result()[0] == 200


@pytest.mark.parametrize("stop", [None, "\n", ["D", "\n\n"]])
def test_completions_are_those_of_the_model(client: openai.OpenAI, llm: LLM, stop: Any) -> None:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for prompt in PROMPTS:
        done = greedy(llm, prompt, 12, stop=stops)
        asked: Any = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        answer = client.completions.create(**asked, stop=stop)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (done.text, done.finish_reason)
        assert choice.logprobs is None
        usage = answer.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
            len(done.prompt_token_ids),
            len(done.token_ids),
            len(done.prompt_token_ids) + len(done.token_ids),
        )
        options: Any = {"include_usage": True}
        chunks = list(
            client.completions.create(**asked, stop=stop, stream=True, stream_options=options)
        )
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert (chunks[-1].choices, chunks[-1].usage) == ([], usage)
        assert all(chunk.usage is None for chunk in chunks[:-1])
        parts = [chunk.choices[0] for chunk in chunks[:-1]]
        assert "".join(part.text for part in parts) == done.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [done.finish_reason]
        assert parts[-1].finish_reason


def test_prompts_of_all_forms_and_several_choices(client: openai.OpenAI, llm: LLM) -> None:
    ids = [list(prompt.encode()) for prompt in PROMPTS[:2]]
    expected = [greedy(llm, prompt).text for prompt in PROMPTS[:2]]
    for prompts in (PROMPTS[:2], ids):
        answer = client.completions.create(
            model=NAME, prompt=prompts, max_tokens=8, temperature=0, extra_body={"top_k": -1}
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    one = client.completions.create(model=NAME, prompt=ids[1], max_tokens=8, temperature=0)
    assert one.choices[0].text == expected[1]
    params = SamplingParams(max_tokens=8, temperature=1.3, top_p=0.9, top_k=40, seed=7, n=3)
    drawn = llm.generate(PROMPTS[:2], params)
    asked: Any = {"model": NAME, "prompt": PROMPTS[:2], "max_tokens": 8, "temperature": 1.3}
    asked |= {"top_p": 0.9, "seed": 7, "n": 3, "extra_body": {"top_k": 40}}
    for _ in range(2):
        answer = client.completions.create(**asked)
        assert [choice.text for choice in answer.choices] == [done.text for done in drawn]
    texts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [done.text for done in drawn]
    seeds = {
        client.completions.create(model=NAME, prompt="a", max_tokens=9).choices[0].text
        for _ in range(4)
    }
    assert len(seeds) > 1  # without a seed, at temperature 1


def test_ends_can_be_passed_over_or_added(client: openai.OpenAI, llm: LLM) -> None:
    plain = greedy(llm, "hello", ignore_eos=True)
    asked: Any = {"model": NAME, "prompt": "hello", "max_tokens": 8, "temperature": 0}
    extra: dict[str, Any] = {"ignore_eos": True}
    got = client.completions.create(**asked, extra_body=extra).choices[0]
    assert (got.text, got.finish_reason) == (plain.text, "length")
    extra["stop_token_ids"] = [plain.token_ids[3]]
    got = client.completions.create(**asked, extra_body=extra).choices[0]
    same = greedy(llm, "hello", ignore_eos=True, stop_token_ids=(plain.token_ids[3],))
    assert (got.text, got.finish_reason) == (same.text, "stop")


def test_chat_goes_through_the_template(client: openai.OpenAI, llm: LLM) -> None:
    done = greedy(llm, CHAT_TEXT, top_logprobs=2)
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", done.text)
    assert choice.finish_reason == done.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CHAT_TEXT)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry, token, logprob, top in zip(
        choice.logprobs.content, done.token_ids, done.logprobs, done.top_logprobs, strict=True
    ):
        alone = chr(token) if token < 128 else f"token_id:{token}"
        assert (entry.token, entry.bytes) == (alone, [token] if token < 128 else None)
        assert entry.logprob == pytest.approx(logprob, abs=1e-4)
        assert [e.logprob for e in entry.top_logprobs] == pytest.approx(
            [p for _, p in top], abs=1e-4
        )
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
    first, *rest = [chunk.choices[0] for chunk in chunks[:-1]]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(part.delta.content or "" for part in rest) == done.text
    assert [part.finish_reason for part in rest] == [None] * (len(rest) - 1) + [done.finish_reason]
    entries = [e for part in rest if part.logprobs for e in part.logprobs.content or ()]
    assert [e.token for e in entries] == [e.token for e in choice.logprobs.content]
    two = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=5, n=2, seed=1)
    assert [c.index for c in two.choices] == [0, 1]
    assert two.choices[0].message != two.choices[1].message
    room = client.chat.completions.create(
        model=NAME, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert room.usage is not None
    assert room.usage.total_tokens == LIMIT + 1  # the last token is never read
    assert room.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_are_the_models(
    client: openai.OpenAI, llm: LLM, stream: bool, echo: bool
) -> None:
    params = {"top_logprobs": 3, "prompt_logprobs": echo}
    done = greedy(llm, "hello", 10, **params)
    asked: Any = {"model": NAME, "prompt": "hello", "max_tokens": 10, "temperature": 0}
    asked |= {"logprobs": 3, "echo": echo, "stream": stream}
    answer: Any = client.completions.create(**asked)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    text = "".join(choice.text for choice in choices)
    assert text == ("hello" if echo else "") + done.text
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    ids, expected, expected_tops = done.token_ids, done.logprobs, done.top_logprobs
    if echo:
        ids = (*done.prompt_token_ids, *ids)
        expected = (*done.prompt_logprobs[1:], *expected)
        expected_tops = (*done.prompt_top_logprobs[1:], *expected_tops)
        assert (logprobs.pop(0), tops.pop(0)) == (None, None)
    names = [chr(token) if token < 128 else f"token_id:{token}" for token in ids]
    assert tokens == names
    assert logprobs == pytest.approx(expected, abs=1e-4)
    for name, top, own, value in zip(names[echo:], tops, expected_tops, expected, strict=True):
        wanted = {chr(i) if i < 128 else f"token_id:{i}": p for i, p in own} | {name: value}
        assert top == pytest.approx(wanted, abs=1e-4)
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("token_id:") or text[offset:].lstrip("\ufffd").startswith(token)
    assert offsets[:5] == [0, 1, 2, 3, 4] if echo else [0]


def test_a_prompt_of_one_token_is_echoed(client: openai.OpenAI, server: Live, llm: LLM) -> None:
    """U53: nothing is known of its only token, and nothing is generated."""
    asked = {"model": NAME, "prompt": "h", "echo": True, "logprobs": 1, "temperature": 0}
    for prompt in ("h", [ord("h")], [[ord("h")]]):
        status, answer = server.ask(
            "POST", "/v1/completions", {**asked, "prompt": prompt, "max_tokens": 0}
        )
        assert status == 200
        assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("h", "length")
        assert choice["logprobs"] == {
            "tokens": ["h"],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
    more: Any = client.completions.create(**asked, max_tokens=1)  # type: ignore[call-overload]
    shown = more.choices[0].logprobs
    assert len(shown.tokens) == len(shown.token_logprobs) == 2
    assert shown.token_logprobs[0] is None
    assert shown.token_logprobs[1] == pytest.approx(greedy(llm, "h", 1).logprobs[0], abs=1e-4)
    assert more.choices[0].text == "h" + greedy(llm, "h", 1).text
    assert more.usage.completion_tokens == 1
    several = client.completions.create(
        model=NAME, prompt="hello", max_tokens=0, echo=True, logprobs=0
    )
    assert several.choices[0].logprobs is not None
    values = several.choices[0].logprobs.token_logprobs
    expected = greedy(llm, "hello", 0, prompt_logprobs=True).prompt_logprobs
    assert values is not None
    assert values[1:] == pytest.approx(expected[1:], abs=1e-4)
    assert client.completions.create(model=NAME, prompt="hello", max_tokens=0).choices[0].text == ""
    chunks = server.events("/v1/completions", {**asked, "max_tokens": 0})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["h"]


def test_simultaneous_requests_get_what_each_gets_alone(server: Live, llm: LLM) -> None:
    rules = [SamplingParams(max_tokens=6 + i, temperature=0.3 * i, seed=i) for i in range(8)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    expected = [llm.generate(p, r)[0].text for p, r in zip(prompts, rules, strict=True)]
    together = threading.Barrier(8)

    def ask(i: int) -> str:
        body: dict[str, Any] = {"model": NAME, "prompt": prompts[i], "seed": i}
        body |= {"max_tokens": rules[i].max_tokens, "temperature": rules[i].temperature}
        together.wait()
        if i % 2:
            chunks = server.events("/v1/completions", body)
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)
        return str(server.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == expected


COMPLETION = {"model": NAME, "prompt": "a", "max_tokens": 2}
OF_CHAT = {"model": NAME, "messages": CHAT, "max_tokens": 2}
BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/completions", b"{", 400, "the body is no JSON"),
    ("POST", "/v1/completions", b"[" * 200_000, 400, "the body is no JSON"),
    ("POST", "/v1/completions", {"model": "other", "prompt": "a"}, 404, "'other' does not exist"),
    ("POST", "/v1/completions", {**COMPLETION, "tools": [1]}, 400, "tools: not supported"),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": ""}, 400, "the prompt is empty"),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": [257]}, 400, "token 257 at place 0"),
    (
        "POST",
        "/v1/completions",
        {**COMPLETION, "prompt": ["a", "b" * 70]},
        400,
        "prompt 2 of 2: a prompt of 70 tokens and max_tokens=2 do not fit the model's 60 "
        "positions: use 60 prompt tokens or less",
    ),
    (
        "POST",
        "/v1/completions",
        {**COMPLETION, "max_tokens": 10**30},
        400,
        f"max_tokens={10**30} do not fit the model's 60 positions: use max_tokens 60 or less",
    ),
    ("POST", "/v1/completions", {**COMPLETION, "temperature": -1}, 400, "temperature=-1"),
    ("POST", "/v1/completions", {**COMPLETION, "temperature": math.nan}, 400, "temperature=nan"),
    ("POST", "/v1/completions", {**COMPLETION, "top_p": 0}, 400, "top_p=0.0 must lie in"),
    ("POST", "/v1/completions", {**COMPLETION, "stop": ""}, 400, "at least one character"),
    ("POST", "/v1/completions", {**COMPLETION, "stop_token_ids": [999]}, 400, "999 is outside"),
    ("POST", "/v1/completions", {**COMPLETION, "n": 21}, 400, "more than the 20 requests"),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": ["a"] * 21}, 400, "more than the 20"),
    ("POST", "/v1/completions", b"x" * (16 * 2**20 + 1), 413, "more than 16777216 bytes"),
    ("POST", "/v1/chat/completions", {**OF_CHAT, "messages": []}, 400, "at least 1 item"),
    ("POST", "/v1/chat/completions", {**OF_CHAT, "n": 21}, 400, "more than the 20 requests"),
    (
        "POST",
        "/v1/chat/completions",
        {**OF_CHAT, "messages": [{"role": "user", "content": "b" * 70}], "max_tokens": None},
        400,
        "do not fit the model's 60 positions: use 60 prompt tokens or less",
    ),
    (
        "POST",
        "/v1/completions",
        {"model": NAME, "prompt": ["b", "b" * 15361]},
        400,
        "15361 characters does not fit the model's 60 positions: use 15360 characters or less",
    ),
    (
        "POST",
        "/v1/chat/completions",
        {**OF_CHAT, "messages": [{"role": "user", "content": "b" * 7700}] * 2},
        400,
        "15400 characters does not fit the model's 60 positions: use 15360 characters or less",
    ),
    ("GET", "/v1/completions", None, 405, "method not allowed"),
    ("GET", "/v1/nowhere", None, 404, "not found"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"), BAD, ids=[b[-1][:30] for b in BAD]
)
def test_bad_requests_are_told_what_is_wrong(
    server: Live, method: str, path: str, body: Any, status: int, message: str
) -> None:
    got, answer = server.ask(method, path, body)
    error = answer["error"]
    assert got == status
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    if "positions" in message:
        assert error["code"] == "context_length_exceeded"


def test_the_clients_own_errors_are_raised(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias: not supported"):
        client.completions.create(model=NAME, prompt="a", logit_bias={"5": 1})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=CHAT)


def test_extreme_values_hurt_nobody(server: Live, llm: LLM) -> None:
    """Beside a request that must not notice."""
    extreme = {"temperature": 1e308, "top_k": 2**62, "top_p": 1e-300, "seed": -(2**63)}
    body = {**COMPLETION, "prompt": ["a", "b"], **extreme}
    with ThreadPoolExecutor(2) as pool:
        odd = pool.submit(server.ask, "POST", "/v1/completions", body)
        plain = {**COMPLETION, "max_tokens": 8, "temperature": 0}
        status, answer = server.ask("POST", "/v1/completions", plain)
        assert odd.result()[0] == 200
    assert (status, answer["choices"][0]["text"]) == (200, greedy(llm, "a").text)


def test_a_client_that_sends_half_a_body_and_leaves(server: Live) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        connection.sendall(head)
        time.sleep(0.05)
    assert server.ask("GET", "/health")[0] == 200


def test_a_connection_serves_several_requests(server: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        for stream in (True, False, True):
            body = {**COMPLETION, "temperature": 0, "stream": stream}
            connection.request("POST", "/v1/completions", body=json.dumps(body).encode())
            response = connection.getresponse()
            assert response.status == 200
            assert response.read()
    finally:
        connection.close()

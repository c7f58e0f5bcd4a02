"""What is asked: taken as it is meant, or refused by name."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from mcore_inference.server.errors import APIError
from mcore_inference.server.protocol import ChatBody, CompletionBody, parse

COMPLETION = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


def of(body: object, **more: object) -> bytes:
    assert isinstance(body, dict)
    return json.dumps({**body, **more}).encode()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, expected: list[object]) -> None:
    assert parse(CompletionBody, of(COMPLETION, prompt=prompt)).prompts == expected


def test_messages_may_be_in_parts_and_may_be_answers_sent_back() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    back = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "audio": None}
    messages = [{"role": "user", "content": parts, "name": "x"}, back]
    body = parse(ChatBody, of(CHAT, messages=messages))
    assert [message.for_template() for message in body.messages] == [
        {"role": "user", "content": "ab", "name": "x"},
        {"role": "assistant", "content": "c"},
    ]


def test_what_asks_for_nothing_is_accepted() -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "reasoning_effort": None,
        "best_of": 1,
        "user": "somebody",
        "metadata": {"a": "b"},
        "seed": None,
        "stop": None,
        "stream_options": None,
    }
    assert parse(ChatBody, of(CHAT, **neutral)) == parse(ChatBody, of(CHAT))
    assert parse(ChatBody, of(CHAT, max_tokens=3, max_completion_tokens=3)).most_tokens == 3
    assert parse(ChatBody, of(CHAT, max_completion_tokens=4)).most_tokens == 4
    assert parse(CompletionBody, of(COMPLETION, temperature=1)).temperature == 1.0
    assert parse(CompletionBody, of(COMPLETION, stop="x")).stops == ("x",)


REFUSED: list[tuple[Any, dict[str, Any], str, str]] = [
    (ChatBody, {"tools": [{"type": "function"}]}, "tools", "tools: not supported, got"),
    (ChatBody, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (ChatBody, {"logit_bias": {"5": 1}}, "logit_bias", "not supported, got {'5': 1}"),
    (ChatBody, {"presence_penalty": 0.1}, "presence_penalty", "not supported, got 0.1"),
    (ChatBody, {"reasoning_effort": "high"}, "reasoning_effort", "not supported, got 'high'"),
    (CompletionBody, {"suffix": "x"}, "suffix", "suffix: not supported"),
    (CompletionBody, {"best_of": 3}, "best_of", "best_of: not supported"),
    (CompletionBody, {"colour": 1}, "colour", "colour: unknown parameter"),
    (CompletionBody, {"min_p": 0.1}, "min_p", "min_p: unknown parameter"),
    (CompletionBody, {"max_tokens": "4"}, "max_tokens", "valid integer, got '4'"),
    (CompletionBody, {"max_tokens": True}, "max_tokens", "valid integer, got True"),
    (CompletionBody, {"max_tokens": -1}, "max_tokens", "greater than or equal to 0, got -1"),
    (CompletionBody, {"temperature": "hot"}, "temperature", "valid number, got 'hot'"),
    (CompletionBody, {"n": 0}, "n", "greater than or equal to 1, got 0"),
    (CompletionBody, {"n": 129}, "n", "less than or equal to 128, got 129"),
    (CompletionBody, {"logprobs": 21}, "logprobs", "less than or equal to 20"),
    (CompletionBody, {"logprobs": True}, "logprobs", "valid integer"),
    (CompletionBody, {"seed": 2**63}, "seed", "less than"),
    (CompletionBody, {"stop": 5}, "stop", "valid string, got 5"),
    (CompletionBody, {"stop": ["a", 5]}, "stop.1", "stop.1: input should be a valid string"),
    (CompletionBody, {"stop": ["a"] * 17}, "stop", "stop: 17 strings, at most 16"),
    (CompletionBody, {"stop": ["a", "b" * 1025]}, "stop", "stop: 1025 characters, at most 1024"),
    (CompletionBody, {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 items"),
    (CompletionBody, {"stream": "yes"}, "stream", "valid boolean"),
    (CompletionBody, {"stream_options": {}}, "stream_options", "only with stream=true"),
    (CompletionBody, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    (CompletionBody, {"prompt": []}, "prompt", "prompt: the list is empty"),
    (CompletionBody, {"prompt": 5}, "prompt", "prompt: give a string, a list of strings"),
    (CompletionBody, {"prompt": None}, "prompt", "prompt: give a string"),
    (CompletionBody, {"prompt": ["a", 5]}, "prompt", "prompt: give a string"),
    (CompletionBody, {"prompt": [1, "a"]}, "prompt", "prompt: give a string"),
    (CompletionBody, {"prompt": [[1, 2.5]]}, "prompt", "prompt: give a string"),
    (CompletionBody, {"prompt": [True]}, "prompt", "prompt: give a string"),
    (CompletionBody, {"model": 5}, "model", "model: input should be a valid string"),
    (ChatBody, {"messages": []}, "messages", "messages: list should have at least 1 item"),
    (ChatBody, {"messages": "hi"}, "messages", "messages: input should be a valid list"),
    (ChatBody, {"messages": [5]}, "messages.0", "messages.0: "),
    (ChatBody, {"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content: miss"),
    (ChatBody, {"top_logprobs": 2}, "top_logprobs", "only with logprobs=true"),
    (ChatBody, {"logprobs": 2}, "logprobs", "valid boolean"),
    (ChatBody, {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "is 3: give one"),
    (ChatBody, {"prompt": "a"}, "prompt", "prompt: unknown parameter"),
]
for _role, _more, _place in (
    ("tool", {}, "messages.0.role"),
    ("user", {"content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content.0"),
    ("assistant", {"tool_calls": [{}]}, "messages.0.tool_calls"),
):
    _message = {"role": _role, "content": "a", **_more}
    REFUSED.append((ChatBody, {"messages": [_message]}, _place, _place))


@pytest.mark.parametrize(("kind", "more", "param", "message"), REFUSED, ids=str)
def test_the_rest_is_refused_by_name(
    kind: Any, more: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(APIError) as caught:
        parse(kind, of(COMPLETION if kind is CompletionBody else CHAT, **more))
    error = caught.value.body()["error"]
    assert caught.value.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(param)
    assert message in error["message"]
    assert error["message"].startswith(param)
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"prompt=a",
        b"\xff\xfe",
        b"[1]",
        b'"a"',
        b"null",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: str(body[:12]),
)
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(APIError, match="the body is no JSON") as caught:
        parse(CompletionBody, body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_missing_parameters_are_named() -> None:
    for kind, missing in ((CompletionBody, "prompt"), (ChatBody, "messages")):
        with pytest.raises(APIError, match=f"^{missing}: missing$"):
            parse(kind, b'{"model": "m"}')  # type: ignore[type-var]
    with pytest.raises(APIError, match=r"^model: missing$"):
        parse(CompletionBody, b'{"prompt": "m"}')

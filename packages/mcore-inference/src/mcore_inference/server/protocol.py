"""What clients may ask, and the refusal of all else.

A parameter that would change the answer and is not built is refused by name. What has no bearing on
the answer (`user`, `metadata`, …) is accepted, and so is the neutral value of a parameter that is
not built (`presence_penalty: 0`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from mcore_inference.server.errors import APIError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024  # of a stop string, which is looked for after every token
MAX_STOP_TOKENS = 1024
_INT64 = 2**63

# Parameters of this interface that are not built, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_WITHOUT_EFFECT = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)


class _Strict(BaseModel):
    """Unknown fields and other types than those declared are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers: none is sent


class Body(_Strict):
    """What both kinds of completion have in common; null stands for the default."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop: {len(self.stops)} strings, at most {MAX_STOPS}")
        longest = max(map(len, self.stops), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop: {longest} characters, at most {MAX_STOP_CHARACTERS}")
        return self


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, as texts or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        one = isinstance(prompt, list) and bool(prompt) and _is_int(prompt[0])
        return [prompt] if one else list(prompt)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.prompt == []:
            raise ValueError("prompt: the list is empty")
        if not isinstance(self.prompt, str | list) or not all(
            isinstance(one, str) or (isinstance(one, list) and all(_is_int(token) for token in one))
            for one in self.prompts
        ):
            raise ValueError(
                "prompt: give a string, a list of strings, a list of tokens or a list of such lists"
            )
        return self


class TextPart(_Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        """An answer sent back as a message has fields that say nothing: `tool_calls: null`."""
        if not isinstance(value, dict):
            return value
        return {key: item for key, item in value.items() if item is not None and item != []}

    def for_template(self) -> dict[str, str]:
        """Return what the chat template gets."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def most_tokens(self) -> int | None:
        """The limit under either of its names."""
        new, old = self.max_completion_tokens, self.max_tokens
        return old if new is None else new

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        new, old = self.max_completion_tokens, self.max_tokens
        if None not in (new, old) and new != old:
            raise ValueError(f"max_tokens: {old}, but max_completion_tokens is {new}: give one")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        return self


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """Return what a request's body asks.

    Raises:
        APIError: 400, with the parameter that is at fault.
    """
    try:
        asked = from_json(body)
    except ValueError as error:
        raise APIError(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(asked, dict):
        raise APIError(400, "the body is no JSON object", code="invalid_json")
    for name in [*_NEUTRAL.keys() & asked.keys(), *_WITHOUT_EFFECT & asked.keys()]:
        value = asked.pop(name)
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise APIError(
                400,
                f"{name}: not supported, got {_short(value)}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _first(error) from None


def _first(error: ValidationError) -> APIError:
    """One fault of several, in one line: of alternatives, that of the one that fitted best."""
    fault = max(error.errors(include_url=False), key=lambda fault: len(fault["loc"]))
    place = ".".join(str(step) for step in fault["loc"] if not _is_branch(step))
    if fault["type"] == "value_error":  # from a validator of ours, which names the parameter
        message = str(fault["ctx"]["error"])
        place = place or message.partition(":")[0]
    elif fault["type"] == "extra_forbidden":
        message = f"{place}: unknown parameter"
    elif fault["type"] == "missing":
        message = f"{place}: missing"
    else:
        message = f"{place}: {fault['msg'].lower()}, got {_short(fault['input'])}"
    return APIError(400, message, param=place, code="invalid_value")


def _is_branch(step: str | int) -> bool:
    """Whether a step of a place is the alternative of a union that was tried."""
    return step in ("str", "list[str]", "list[TextPart]")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Answers as JSON objects: whole, and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from mcore_inference.async_engine import Chunk, Generation
from mcore_inference.server.logprobs import TokenNames, chat_logprobs, completion_logprobs
from mcore_inference.server.protocol import ChatBody, CompletionBody
from mcore_inference.server.service import Plan
from mcore_inference.text import TextStream

JSON = dict[str, Any]


class Answer(Protocol):
    """How one kind of completion is written down."""

    plan: Plan
    include_usage: bool

    def whole(self) -> JSON:
        """Return the answer, when all requests are finished."""
        ...

    def opening(self) -> list[JSON]:
        """Return the chunks that come before any token."""
        ...

    def chunk(self, chunk: Chunk) -> JSON:
        """Return a chunk of one choice."""
        ...

    def usage_chunk(self) -> JSON:
        """Return the chunk with the usage, when all requests are finished."""
        ...


async def events(answer: Answer, generation: Generation) -> AsyncIterator[JSON]:
    """Give the chunks of a streamed answer; raises as `Generation.chunks` does."""
    for opening in answer.opening():
        yield opening
    async for chunk in generation.chunks():
        yield answer.chunk(chunk)
    if answer.include_usage:
        yield answer.usage_chunk()


class _Base:
    """What both kinds have in common."""

    def __init__(
        self, plan: Plan, names: TokenNames, *, kind: str, model: str, include_usage: bool
    ) -> None:
        self.plan = plan
        self.include_usage = include_usage
        self._names = names
        self._head = {"created": int(time.time()), "model": model}
        self._id = f"{kind}-{secrets.token_hex(12)}"

    def _object(self, name: str, choices: list[JSON]) -> JSON:
        return {"id": self._id, "object": name, **self._head, "choices": choices}

    def _chunk(self, name: str, choices: list[JSON]) -> JSON:
        usage = {"usage": None} if self.include_usage else {}
        return {**self._object(name, choices), **usage}

    def _usage(self) -> JSON:
        prompt = self.plan.num_prompt_tokens
        generated = sum(len(request.tokens) for request in self.plan.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


class CompletionAnswer(_Base):
    """`text_completion`: the prompt comes first where `echo` asks for it."""

    def __init__(self, plan: Plan, names: TokenNames, body: CompletionBody) -> None:
        super().__init__(
            plan, names, kind="cmpl", model=body.model, include_usage=body.include_usage
        )
        self._echo = bool(body.echo)
        self._with_logprobs = body.logprobs is not None
        self._echoed: set[int] = set()

    def whole(self) -> JSON:
        """Return the answer, when all requests are finished."""
        choices = []
        for index, request in enumerate(self.plan.requests):
            assert request.text is not None
            tokens = range(len(request.tokens))
            logprobs = self._logprobs(index, tokens, echo=self._echo)
            text = self.plan.prompts[index] + request.text.text
            choices.append(_choice(index, text, logprobs, request.finish_reason))
        return {**self._object("text_completion", choices), "usage": self._usage()}

    def opening(self) -> list[JSON]:
        """Return nothing: the prompt's log-probabilities come with the first tokens."""
        return []

    def chunk(self, chunk: Chunk) -> JSON:
        """Return a chunk of one choice, the first of each with the prompt."""
        index = chunk.index
        echo = self._echo and index not in self._echoed
        self._echoed.add(index)
        logprobs = self._logprobs(index, chunk.tokens, echo=echo)
        text = (self.plan.prompts[index] if echo else "") + chunk.text
        choice = _choice(index, text, logprobs, chunk.finish_reason)
        return self._chunk("text_completion", [choice])

    def usage_chunk(self) -> JSON:
        """Return the chunk with the usage, when all requests are finished."""
        return {**self._object("text_completion", []), "usage": self._usage()}

    def _logprobs(self, index: int, tokens: range, *, echo: bool) -> JSON | None:
        """Those of generated tokens, after those of the prompt with `echo`."""
        if not self._with_logprobs:
            return None
        request = self.plan.requests[index]
        before = len(self.plan.prompts[index])
        span = slice(tokens.start, tokens.stop)
        offsets = [before + start for start in _starts(request.text, tokens)]
        ids = request.tokens[span]
        logprobs: list[float | None] = [*request.logprobs[span]]
        tops: list[Any] = [*request.top_logprobs[span]]
        if echo:
            stream = TextStream(self._names.tokenizer)
            for token in request.prompt:
                stream.append(token)
            stream.close()
            offsets = _starts(stream, range(len(request.prompt))) + offsets
            ids = [*request.prompt, *ids]
            logprobs = [None, *request.prompt_logprobs, *logprobs]
            tops = [None, *request.prompt_top_logprobs, *tops]
        return completion_logprobs(self._names, ids, logprobs, tops, offsets)


class ChatAnswer(_Base):
    """`chat.completion`: a message of the assistant."""

    def __init__(self, plan: Plan, names: TokenNames, body: ChatBody) -> None:
        super().__init__(
            plan, names, kind="chatcmpl", model=body.model, include_usage=body.include_usage
        )
        self._with_logprobs = bool(body.logprobs)

    def whole(self) -> JSON:
        """Return the answer, when all requests are finished."""
        choices = []
        for index, request in enumerate(self.plan.requests):
            assert request.text is not None
            message = {"role": "assistant", "content": request.text.text, "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(index, range(len(request.tokens))),
                    "finish_reason": request.finish_reason,
                }
            )
        return {**self._object("chat.completion", choices), "usage": self._usage()}

    def opening(self) -> list[JSON]:
        """Return the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        return [self._delta(index, delta, None, None) for index in range(len(self.plan.requests))]

    def chunk(self, chunk: Chunk) -> JSON:
        """Return a chunk of one choice."""
        delta = {"content": chunk.text} if chunk.text else {}
        logprobs = self._logprobs(chunk.index, chunk.tokens)
        return self._delta(chunk.index, delta, logprobs, chunk.finish_reason)

    def usage_chunk(self) -> JSON:
        """Return the chunk with the usage, when all requests are finished."""
        return {**self._object("chat.completion.chunk", []), "usage": self._usage()}

    def _delta(
        self, index: int, delta: JSON, logprobs: JSON | None, finish_reason: str | None
    ) -> JSON:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        choices = [{**choice, "finish_reason": finish_reason}]
        return self._chunk("chat.completion.chunk", choices)

    def _logprobs(self, index: int, tokens: range) -> JSON | None:
        if not self._with_logprobs:
            return None
        request = self.plan.requests[index]
        span = slice(tokens.start, tokens.stop)
        columns = request.tokens[span], request.logprobs[span], request.top_logprobs[span]
        return chat_logprobs(self._names, *columns)


def _choice(index: int, text: str, logprobs: JSON | None, finish_reason: str | None) -> JSON:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _starts(stream: TextStream | None, tokens: range) -> list[int]:
    """Where each of `tokens` begins in the text; those without text, where they stand."""
    assert stream is not None
    ends = stream.ends
    places = (i - 1 for i in tokens)
    starts = (0 if i < 0 else ends[i] if i < len(ends) else stream.visible for i in places)
    return [min(start, stream.visible) for start in starts]

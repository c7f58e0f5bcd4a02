"""From what a client asks to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_inference.async_engine import AsyncEngine
from mcore_inference.engine import check_length
from mcore_inference.llm import LLM
from mcore_inference.request import Request
from mcore_inference.sampling import SamplingParams
from mcore_inference.server.errors import APIError
from mcore_inference.server.logprobs import TokenNames
from mcore_inference.server.protocol import Body, ChatBody, CompletionBody
from mcore_inference.text import TextStream

_MAX_TOKENS = 16  # of a text completion that names no number: this interface's default
_PLAIN = SamplingParams(max_tokens=1)
# A text with more characters than this for each position is refused before it becomes tokens: a
# tokenizer may hold the interpreter meanwhile, and with it every other request.
_MOST_CHARACTERS = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an answer is made of.

    Attributes:
        requests: the choices, in order: all of the first prompt, then all of the second.
        prompts: the text of each choice's prompt, where it belongs to the answer; else "".
        num_prompt_tokens: of all prompts, each counted once.
    """

    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    num_prompt_tokens: int


class Service:
    """A model under the name by which clients ask for it.

    Args:
        llm: the model, its tokenizer and its chat template.
        engine: its engine, running.
        name: what clients call it.
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, name: str) -> None:
        self.llm = llm
        self.engine = engine
        self.name = name
        self.names = TokenNames(llm.tokenizer)

    @property
    def max_length(self) -> int:
        """How many positions prompt and answer may take together."""
        return self.llm.model.config.max_positions

    def check_model(self, name: str) -> None:
        """Raise APIError 404 when another model is asked for."""
        if name != self.name:
            raise APIError(
                404,
                f"the model {name!r} does not exist: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def plan_completion(self, body: CompletionBody) -> Plan:
        """Return the requests of a text completion.

        Raises:
            APIError: 400, the prompts or parameters cannot run.
        """
        self._check_count(len(body.prompts), body.n or 1, "prompt")
        self._check_characters([one for one in body.prompts if isinstance(one, str)], "prompt")
        params = self._params(
            body,
            max_tokens=_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            top_logprobs=body.logprobs or 0,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )
        tokenizer = self.llm.tokenizer
        try:
            given = body.prompts
            tokens = [self.llm.encode(one) if isinstance(one, str) else one for one in given]
            texts = [""] * len(given)
            if body.echo:
                texts = [
                    one if isinstance(one, str) else _text(TextStream(tokenizer), one)
                    for one in given
                ]
        except ValueError as error:
            raise APIError(400, str(error), param="prompt", code="invalid_value") from None
        return self._plan(tokens, texts, params, "prompt")

    def plan_chat(self, body: ChatBody) -> Plan:
        """Return the requests of a chat completion.

        Raises:
            APIError: 400, the template refuses the messages, or the parameters cannot run.
        """
        self._check_count(1, body.n or 1, "n")
        messages = [message.for_template() for message in body.messages]
        self._check_characters(["".join(turn["content"] for turn in messages)], "messages")
        try:
            tokens = self.llm.chat_template.encode(messages, self.llm.tokenizer)
        except ValueError as error:
            raise APIError(400, str(error), param="messages", code="invalid_value") from None
        most = body.most_tokens
        room = self.max_length - len(tokens) + 1
        params = self._params(
            body,
            max_tokens=max(room, 1) if most is None else most,
            top_logprobs=body.top_logprobs or 0,
        )
        return self._plan([tokens], [""], params, "messages")

    def _params(
        self, body: Body, *, max_tokens: int, top_logprobs: int, prompt_logprobs: bool = False
    ) -> SamplingParams:
        """The rules; what is not said is as this interface has it: temperature 1, a new seed."""
        vocab_size = self.llm.tokenizer.vocab_size
        for token in body.stop_token_ids or ():
            if not 0 <= token < vocab_size:
                raise APIError(
                    400,
                    f"stop_token_ids: {token} is outside the vocabulary: 0 to {vocab_size - 1}",
                    param="stop_token_ids",
                    code="invalid_value",
                )
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=min(max(body.top_k or 0, 0), vocab_size),
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                ignore_eos=bool(body.ignore_eos),
                stop=body.stops,
                n=body.n or 1,
                top_logprobs=top_logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        except ValueError as error:
            message = str(error)
            param = message.partition("=")[0]
            raise APIError(400, message, param=param, code="invalid_value") from None

    def _plan(
        self, prompts: Sequence[list[int]], texts: Sequence[str], params: SamplingParams, param: str
    ) -> Plan:
        for index, prompt in enumerate(prompts):
            which = f"prompt {index + 1} of {len(prompts)}: " if len(prompts) > 1 else ""
            code = "context_length_exceeded"
            try:
                check_length(len(prompt), params.max_tokens, self.max_length)
                code = "invalid_value"
                self.engine.engine.check(Request(prompt=tuple(prompt), params=_PLAIN))
            except ValueError as error:
                raise APIError(400, f"{which}{error}", param=param, code=code) from None
        try:
            samples = [
                [self.llm.request(prompt, one, follow=True) for one in params.each()]
                for prompt in prompts
            ]
        except ValueError as error:  # a token that the model has and the tokenizer has not
            raise APIError(400, str(error), param=param, code="invalid_value") from None
        return Plan(
            requests=tuple(request for group in samples for request in group),
            prompts=tuple(text for text in texts for _ in range(params.n)),
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def _check_count(self, prompts: int, choices: int, param: str) -> None:
        most = self.engine.capacity
        if prompts * choices > most:
            raise APIError(
                400,
                f"{param}: {prompts} prompts with {choices} choices each are more than the {most} "
                f"requests that this server holds",
                param=param,
                code="invalid_value",
            )

    def _check_characters(self, texts: Sequence[str], param: str) -> None:
        most = self.max_length * _MOST_CHARACTERS
        longest = max(map(len, texts), default=0)
        if longest > most:
            raise APIError(
                400,
                f"a text of {longest} characters does not fit the model's {self.max_length} "
                f"positions: use {most} characters or less",
                param=param,
                code="context_length_exceeded",
            )


def _text(stream: TextStream, tokens: Sequence[int]) -> str:
    for token in tokens:
        stream.append(token)
    stream.close()
    return stream.text

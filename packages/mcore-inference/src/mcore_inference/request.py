"""A prompt on its way, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mcore_inference.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(kw_only=True, eq=False)
class Request:
    """A sequence being generated: the prompt, the rules, and the tokens so far.

    `end_ids` are the tokens that end a text of this tokenizer. `tokens` are those generated, the
    one that ended the text included, and `logprobs` their log-probabilities under the model itself
    (before temperature and cut-offs): what a learner needs who also learns where to stop.
    `sampling_logprobs` are those under the distribution that the tokens were drawn from.
    `weights_version` is that of the engine's weights. `finish_reason` is None until the request is
    finished.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    weights_version: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.params.max_tokens == 0:
            self.finish_reason = "length"

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated."""
        return len(self.prompt) + len(self.tokens)

    @property
    def capacity(self) -> int:
        """How many tokens the model reads at most: the last one generated is never read."""
        return len(self.prompt) + max(self.params.max_tokens, 1) - 1

    def tokens_from(self, start: int) -> list[int]:
        """Return prompt and generated tokens from position `start` on."""
        if start < len(self.prompt):
            return [*self.prompt[start:], *self.tokens]
        return self.tokens[start - len(self.prompt) :]

    def append(self, token: int, logprob: float, sampling_logprob: float) -> None:
        """Take the next token, and finish if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        ends = token in self.end_ids and not self.params.ignore_eos
        if ends or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.params.max_tokens:
            self.finish_reason = "length"

    @property
    def text_tokens(self) -> list[int]:
        """The tokens generated, without the one that ended the text."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished text.

    Attributes:
        prompt: the text that was continued.
        text: the continuation alone, without the token that ended it.
        prompt_token_ids: the tokens of the prompt.
        token_ids: the tokens generated, the one that ended the text included.
        logprobs: natural log-probability of each of `token_ids` under the model itself, before
            temperature and cut-offs.
        sampling_logprobs: that of each of `token_ids` under the distribution it was drawn from,
            after temperature and cut-offs; 0 at temperature 0.
        weights_version: of the weights that all of it was generated with, see `LLM.update_weights`.
        finish_reason: "stop" at an end or stop token, "length" at `max_tokens`.
    """

    prompt: str
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    weights_version: int
    finish_reason: FinishReason

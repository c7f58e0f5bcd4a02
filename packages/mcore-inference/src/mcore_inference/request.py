"""A prompt on its way, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mcore_inference.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(kw_only=True)
class Request:
    """A sequence being generated: the prompt, the rules, and the tokens so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.params.max_tokens == 0:
            self.finish_reason = "length"

    def append(self, token: int, logprob: float) -> None:
        """Take the next token. A token that ends the text is not part of it."""
        ends = self.eos_ids if not self.params.ignore_eos else frozenset()
        if token in ends or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if len(self.tokens) == self.params.max_tokens:
            self.finish_reason = "length"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished text.

    `text` is the completion alone, `token_ids` its tokens, `logprobs` their log-probabilities under
    the model itself (before temperature and cut-offs), `finish_reason` "stop" at an end token or
    "length" at `max_tokens`.
    """

    prompt: str
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason

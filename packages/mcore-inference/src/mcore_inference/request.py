"""A prompt on its way, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mcore_inference.sampling import SamplingParams, Tops
from mcore_inference.text import TextStream

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

    `is_read` says that the model reads the prompt by an encoder, and the tokens do not go on from
    it. `text` follows the text while it is generated; stop strings need it. `top_logprobs` are the
    most probable tokens at each of `tokens`; `prompt_logprobs` and `prompt_top_logprobs` are filled
    by the pass over the prompt, one entry per token after the first: of that nothing is known.

    Raises:
        ValueError: the parameters ask for several samples, or for stop strings without `text`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int] = frozenset()
    is_read: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    weights_version: int = 0
    finish_reason: FinishReason | None = None
    text: TextStream | None = None
    top_logprobs: Tops = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: Tops = field(default_factory=list)
    num_text_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise ValueError(f"n={self.params.n}: a request is one sample, params.each() has them")
        if self.params.stop and self.text is None:
            raise ValueError(f"stop={self.params.stop!r} needs the text of the request")
        if self.params.max_tokens == 0 and not self.wants_prompt:
            self._finish("length")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and those generated."""
        return len(self.prompt) + len(self.tokens)

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are asked for and not there yet."""
        missing = len(self.prompt) - 1 - len(self.prompt_logprobs)
        return self.params.prompt_logprobs and missing > 0

    @property
    def capacity(self) -> int:
        """How many tokens the model reads at most: the last one generated is never read."""
        return len(self.prompt) + max(self.params.max_tokens, 1) - 1

    def tokens_from(self, start: int) -> list[int]:
        """Return prompt and generated tokens from position `start` on."""
        if start < len(self.prompt):
            return [*self.prompt[start:], *self.tokens]
        return self.tokens[start - len(self.prompt) :]

    def take_prompt(self, logprobs: list[float], tops: Tops) -> None:
        """Take the log-probabilities of the prompt's tokens after the first."""
        self.prompt_logprobs = logprobs
        self.prompt_top_logprobs = tops
        if self.params.max_tokens == 0:
            self._finish("length")

    def append(
        self,
        token: int,
        logprob: float,
        sampling_logprob: float,
        top: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Take the next token, and finish if it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampling_logprobs.append(sampling_logprob)
        self.top_logprobs.append(top)
        ends = token in self.end_ids and not self.params.ignore_eos
        if ends or token in self.params.stop_token_ids:
            self.num_text_tokens = len(self.tokens) - 1
            self._finish("stop")
            return
        self.num_text_tokens = len(self.tokens)
        if self.text is not None:
            self.text.append(token)
        if self.text is not None and self.text.stopped:
            self._finish("stop")
        elif len(self.tokens) >= self.params.max_tokens:
            self._finish("length")

    def _finish(self, reason: FinishReason) -> None:
        if self.text is not None:
            self.text.close()
        self.finish_reason = reason

    @property
    def text_tokens(self) -> list[int]:
        """The tokens generated, without an end or stop token."""
        return self.tokens[: self.num_text_tokens]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished text.

    Attributes:
        prompt: the text that was continued.
        text: the continuation alone, without the token or string that ended it, and without a
            character of which the end cuts off bytes.
        prompt_token_ids: the tokens of the prompt.
        token_ids: the tokens generated, the one that ended the text included.
        logprobs: natural log-probability of each of `token_ids` under the model itself, before
            temperature and cut-offs.
        sampling_logprobs: that of each of `token_ids` under the distribution it was drawn from,
            after temperature and cut-offs; 0 at temperature 0.
        weights_version: of the weights that all of it was generated with, see `LLM.update_weights`.
        finish_reason: "stop" at an end or stop token or a stop string, "length" at `max_tokens`.
        top_logprobs: for each of `token_ids`, the `SamplingParams.top_logprobs` most probable
            tokens with their log-probabilities, best first.
        prompt_logprobs: of each of `prompt_token_ids`, None for the first; empty unless asked for.
        prompt_top_logprobs: the most probable tokens at each of them, none at the first.
    """

    prompt: str
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    weights_version: int
    finish_reason: FinishReason
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

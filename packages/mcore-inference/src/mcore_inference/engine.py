"""From requests to finished requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore_inference.request import Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import Tops, draw, log_probabilities, top_log_probabilities
from mcore_inference.scheduler import Scheduler
from mcore_inference.weights import WeightLink


class Engine:
    """Generates requests together; one may join or leave between any two steps.

    A step is one forward pass over the whole prompts of the requests that join (packed, of any
    lengths) and one token of each that runs already. What a request gets does not depend on the
    others. All ranks of the model's mesh make the same calls.

    Args:
        runner: the model.
        max_sequences: how many requests run at a time; others wait.
        max_batch_tokens: how many tokens a pass may hold; a longer prompt runs alone.
        vocab_size: sample from the first so many tokens only, for a model with more rows than its
            tokenizer has ids; default all.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_sequences: int = 64,
        max_batch_tokens: int = 8192,
        vocab_size: int | None = None,
    ) -> None:
        self.runner = runner
        self.vocab_size = vocab_size
        self._scheduler = Scheduler(max_sequences=max_sequences, max_batch_tokens=max_batch_tokens)
        self._cache = runner.make_cache()
        self._sequences: dict[Request, int] = {}
        self.weights_version = 0

    @property
    def max_sequences(self) -> int:
        """How many requests run at a time."""
        return self._scheduler.max_sequences

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests whose turn has not come, in order."""
        return tuple(self._scheduler.waiting)

    def run(self, requests: Sequence[Request]) -> None:
        """Finish `requests`: fill in their tokens, log-probabilities and finish reasons.

        Raises:
            ValueError: as `add` does, and which of several it was; then none has run.
            FloatingPointError: as `step` does; then all of them are dropped.
        """
        self.check_each(requests)
        try:
            for request in requests:
                self.add(request)
            while any(request.finish_reason is None for request in requests):
                self.step()
        except BaseException:
            self.abort(requests)
            raise

    def add(self, request: Request) -> None:
        """Let a request take part from the next step that has room for it.

        Raises:
            ValueError: the prompt is empty, has a token outside the vocabulary, or does not fit
                the learned positions together with `max_tokens`.
        """
        self.check(request)
        request.weights_version = self.weights_version
        if request.finish_reason is None:
            self._scheduler.add(request)

    def step(self) -> list[Request]:
        """Generate one token of every running request; return those that are finished by it.

        Raises:
            FloatingPointError: the model's logits are not numbers. After this or any other error
                the requests that ran are dropped.
        """
        for request in self._scheduler.admit():
            self._sequences[request] = self._cache.open(request.capacity)
        running = list(self._scheduler.running)
        if not running:
            return []
        try:
            self._advance(running)
        except BaseException:
            self.abort(running)  # a pass cut short leaves their caches half written
            raise
        finished = [request for request in running if request.finish_reason is not None]
        self.abort(finished)
        return finished

    def update_weights(self, link: WeightLink, *, version: int | None = None) -> int:
        """Take over the weights at the other end of `link`; return their version.

        All ranks of the link's group call it, or the link itself where they have no engine. The
        version is one more than before, or the one given; requests carry it.

        Raises:
            RuntimeError: requests are under way on some rank, whose caches the old weights have
                filled; raised on every rank, and no weight has changed.
        """
        under_way = self._scheduler.size
        refusal = f"{under_way} requests are under way: finish or abort them" if under_way else None
        link(refusal=refusal)
        self.weights_version = self.weights_version + 1 if version is None else version
        return self.weights_version

    def abort(self, requests: Iterable[Request]) -> None:
        """Drop requests and their caches, at whatever point; those not here are passed over."""
        for request in requests:
            self._scheduler.remove(request)
            sequence = self._sequences.pop(request, None)
            if sequence is not None:
                self._cache.close(sequence)

    def _advance(self, running: list[Request]) -> None:
        """One forward pass, and the next token of each request."""
        sequences = [self._sequences[request] for request in running]
        new = [
            (sequence, request.tokens_from(self._cache.length(sequence)))
            for request, sequence in zip(running, sequences, strict=True)
        ]
        wanted = [len(request.prompt) if request.wants_prompt else 1 for request in running]
        logits = self.runner(new, self._cache, wanted).float()
        _check_finite(logits, running, wanted)
        rows = torch.split(logits, wanted)
        for request, own in zip(running, rows, strict=True):
            if request.wants_prompt:
                self._report_prompt(request, own[:-1])
        if len(logits) > len(running):
            going = [row for row, request in enumerate(running) if request.finish_reason is None]
            running = [running[row] for row in going]
            logits = torch.stack([rows[row][-1] for row in going]) if going else logits[:0]
        if running:
            self._generate(running, logits)

    def _report_prompt(self, request: Request, logits: Tensor) -> None:
        """Tell a request how probable its prompt was, by the logits [P-1, V] after each token."""
        targets = torch.tensor(request.prompt[1:], device=logits.device)
        tops = top_log_probabilities(logits, request.params.top_logprobs, among=self.vocab_size)
        request.take_prompt(log_probabilities(logits, targets).tolist(), tops)

    def _generate(self, running: list[Request], logits: Tensor) -> None:
        """Give each request its next token, by its row of logits [N, V]."""
        generated = [len(request.tokens) for request in running]
        known = logits[:, : self.vocab_size]
        params, op = [request.params for request in running], self.runner.model.kernels.sample
        chosen, drawn = draw(known, params, generated, op=op)
        raw = log_probabilities(logits, chosen)
        columns = (chosen.tolist(), raw.tolist(), drawn.tolist(), self._tops(running, logits))
        for request, token, logprob, sampling, top in zip(running, *columns, strict=True):
            request.append(token, logprob, sampling, top)

    def _tops(self, running: list[Request], logits: Tensor) -> Tops:
        """The most probable tokens of each row, as many as its request asks for."""
        asked = [request.params.top_logprobs for request in running]
        tops: Tops = [()] * len(running)
        rows = [row for row, count in enumerate(asked) if count]
        if not rows:
            return tops
        found = top_log_probabilities(logits[rows], max(asked), among=self.vocab_size)
        for row, top in zip(rows, found, strict=True):
            tops[row] = top[: asked[row]]
        return tops

    def check_each(self, requests: Sequence[Request]) -> None:
        """Raise the ValueError that `run` would."""
        for index, request in enumerate(requests):
            try:
                self.check(request)
            except ValueError as error:
                which = f"prompt {index + 1} of {len(requests)}: " if len(requests) > 1 else ""
                raise ValueError(f"{which}{error}") from None

    def check(self, request: Request) -> None:
        """Raise the ValueError that `add` would."""
        config = self.runner.model.config
        prompt, most = len(request.prompt), request.params.max_tokens
        if prompt == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if request.params.prompt_logprobs and self.runner.reads_source:
            raise ValueError(
                "prompt_logprobs=True, and this model reads a prompt by its encoder, without "
                "telling what comes next in it: leave them out"
            )
        for index, token in enumerate(request.prompt):
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"token {token} at place {index} of the prompt is outside the model's "
                    f"vocabulary: 0 to {config.vocab_size - 1}"
                )
        if config.position == "learned":
            check_length(prompt, most, config.max_positions)


def check_length(num_prompt_tokens: int, max_tokens: int, limit: int) -> None:
    """Raise ValueError when prompt and answer need more than `limit` positions.

    The last token generated needs none: the model never reads it.
    """
    fits = limit - num_prompt_tokens + 1
    if max(max_tokens, 1) > fits:
        advice = f"max_tokens {fits} or less" if fits > 0 else f"{limit} prompt tokens or less"
        raise ValueError(
            f"a prompt of {num_prompt_tokens} tokens and max_tokens={max_tokens} do not fit the "
            f"model's {limit} positions: use {advice}"
        )


def _check_finite(logits: Tensor, running: list[Request], wanted: list[int]) -> None:
    """Raise FloatingPointError where a request's rows of logits are not numbers."""
    peaks = iter(logits.amax(-1).tolist())
    for request, count in zip(running, wanted, strict=True):
        for peak in [next(peaks) for _ in range(count)]:
            if not math.isfinite(peak):
                raise FloatingPointError(
                    f"the model's logits after {request.num_tokens} tokens are not finite "
                    f"(largest: {peak}): check its weights"
                )

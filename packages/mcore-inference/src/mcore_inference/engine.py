"""From requests to finished requests."""

from __future__ import annotations

import torch

from mcore_inference.cache import ContiguousCache
from mcore_inference.request import Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import sample


class Engine:
    """Generates a batch of requests together until each is finished.

    The first pass reads all prompts at once (as packed sequences of any lengths), every later one
    adds one token per unfinished request.
    """

    def __init__(self, runner: ModelRunner, *, max_positions: int | None) -> None:
        self.runner = runner
        self.max_positions = max_positions

    def run(self, requests: list[Request]) -> None:
        """Fill in the tokens and the finish reasons of `requests`.

        Raises:
            ValueError: a prompt is empty, or does not fit with its `max_tokens`; nothing has run.
        """
        for request in requests:
            self._check(request)
        pending = [request for request in requests if request.finish_reason is None]
        if not pending:
            return
        # The last token generated is never read back, hence no slot for it.
        capacity = max(len(r.prompt) + r.params.max_tokens - 1 for r in pending)
        cache = ContiguousCache(len(pending), capacity)
        new = [list(request.prompt) for request in pending]
        while any(new):
            logits = self.runner(new, cache).float()
            active = [request for request, tokens in zip(pending, new, strict=True) if tokens]
            chosen = sample(logits, [r.params for r in active], [len(r.tokens) for r in active])
            logprobs = torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0].tolist()
            for request, token, logprob in zip(active, chosen.tolist(), logprobs, strict=True):
                request.append(token, logprob)
            new = [r.tokens[-1:] if r.finish_reason is None else [] for r in pending]

    def _check(self, request: Request) -> None:
        prompt, most = len(request.prompt), request.params.max_tokens
        if prompt == 0:
            raise ValueError("the prompt is empty: give at least one token")
        vocabulary = self.runner.model.config.vocab_size
        for token in request.prompt:
            if not 0 <= token < vocabulary:
                raise ValueError(f"token {token} is outside the vocabulary of {vocabulary}")
        limit = self.max_positions
        if limit is not None and prompt + most > limit:
            fits = limit - prompt
            advice = f"use max_tokens {fits} or less" if fits >= 0 else "use a shorter prompt"
            raise ValueError(
                f"a prompt of {prompt} tokens and max_tokens={most} exceed the model's "
                f"{limit} positions: {advice}"
            )

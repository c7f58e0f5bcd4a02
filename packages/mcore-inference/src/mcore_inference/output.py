"""From tokens back to text."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_data import Tokenizer
from mcore_inference.request import Completion, Request

_BROKEN = "\ufffd"  # what a tokenizer makes of bytes that are no UTF-8


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what the text of prompt and tokens has more than that of the prompt.

    Not the tokens decoded alone, where a piece at the seam may read otherwise: leading blanks, the
    bytes of one character. A character that the prompt leaves incomplete belongs to the
    continuation.
    """
    before = tokenizer.decode(prompt)
    after = tokenizer.decode([*prompt, *tokens])
    for start in (before, before.rstrip(_BROKEN)):
        if after.startswith(start):
            return after[len(start) :]
    return tokenizer.decode(tokens)


def completion(tokenizer: Tokenizer, prompt: str, request: Request) -> Completion:
    """Return what a finished request has become; `prompt` is its text as the user gave it."""
    assert request.finish_reason is not None
    return Completion(
        prompt=prompt,
        text=continuation(tokenizer, request.prompt, request.text_tokens),
        prompt_token_ids=request.prompt,
        token_ids=tuple(request.tokens),
        logprobs=tuple(request.logprobs),
        sampling_logprobs=tuple(request.sampling_logprobs),
        weights_version=request.weights_version,
        finish_reason=request.finish_reason,
    )

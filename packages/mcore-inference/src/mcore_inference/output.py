"""From tokens back to text."""

from __future__ import annotations

from mcore_data import Tokenizer
from mcore_inference.request import Completion, Request
from mcore_inference.text import continuation, without_cut_character


def completion(tokenizer: Tokenizer, prompt: str, request: Request) -> Completion:
    """Return what a finished request has become; `prompt` is its text as the user gave it."""
    assert request.finish_reason is not None
    params = request.params
    both = params.prompt_logprobs and params.top_logprobs
    return Completion(
        prompt=prompt,
        text=_text(tokenizer, request),
        prompt_token_ids=request.prompt,
        token_ids=tuple(request.tokens),
        logprobs=tuple(request.logprobs),
        sampling_logprobs=tuple(request.sampling_logprobs),
        weights_version=request.weights_version,
        finish_reason=request.finish_reason,
        top_logprobs=tuple(request.top_logprobs) if params.top_logprobs else (),
        prompt_logprobs=(None, *request.prompt_logprobs) if params.prompt_logprobs else (),
        prompt_top_logprobs=((), *request.prompt_top_logprobs) if both else (),
    )


def _text(tokenizer: Tokenizer, request: Request) -> str:
    if request.text is not None:
        return request.text.text
    before = () if request.is_read else request.prompt
    return without_cut_character(continuation(tokenizer, before, request.text_tokens))

"""A model that says what a script says, when it is told to."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mcore_data import ByteTokenizer
from mcore_inference import LLM, ContiguousCache
from mcore_kernels import Kernels
from mcore_models import ModelConfig, build_model


class Pieces(ByteTokenizer):
    """Ids are places in a list of pieces; other ids have no text."""

    def __init__(self, *pieces: str) -> None:
        super().__init__()
        object.__setattr__(self, "pieces", pieces)

    def decode(self, ids: Iterable[int]) -> str:
        pieces: tuple[str, ...] = self.pieces  # type: ignore[attr-defined]
        return "".join(pieces[i] for i in ids if i < len(pieces))


class ScriptedRunner:
    """In place of a `ModelRunner`: each prompt is continued by its script, then by 255 for ever.

    `turns`, if it is set, is acquired before every pass. The next pass raises `error`, if it is
    set. `passes` counts them.
    """

    reads_source = False
    make_cache = staticmethod(ContiguousCache)

    def __init__(self, config: ModelConfig, scripts: Mapping[tuple[int, ...], Sequence[int]]):
        self.model: Any = SimpleNamespace(config=config, kernels=Kernels())
        self.scripts = scripts
        self.turns: threading.Semaphore | None = None
        self.error: Exception | None = None
        self.passes = 0
        self._prompts: dict[int, tuple[int, ...]] = {}

    def __call__(
        self,
        new: Sequence[tuple[int, list[int]]],
        cache: ContiguousCache,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        if self.turns is not None:
            self.turns.acquire()
        self.passes += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        said = []
        for (sequence, tokens), count in zip(new, wanted or [1] * len(new), strict=True):
            if not cache.length(sequence):
                self._prompts[sequence] = tuple(tokens)
            prompt = self._prompts[sequence]
            script = [*prompt[1:], *self.scripts.get(prompt, ())]
            end = cache.length(sequence) + len(tokens)
            said += [script[i] if i < len(script) else 255 for i in range(end - count, end)]
        cache.begin([(sequence, len(tokens)) for sequence, tokens in new], torch.device("cpu"))
        logits = torch.zeros(len(said), self.model.config.vocab_size)
        logits[range(len(said)), said] = 5.0
        return logits


def scripted(
    config: ModelConfig,
    tokenizer: ByteTokenizer,
    scripts: Mapping[tuple[int, ...], Sequence[int]],
    **limits: int,
) -> tuple[LLM, ScriptedRunner]:
    """An LLM that follows scripts, by the tokens of the prompt; and what drives it."""
    llm = LLM(build_model(config, device="meta"), tokenizer, **limits)  # type: ignore[arg-type]
    runner = ScriptedRunner(config, scripts)
    llm.engine.runner = runner  # type: ignore[assignment]
    return llm, runner

"""One forward pass over the new tokens of several sequences.

T new tokens of M sequences, R logits wanted, V vocabulary entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mcore_inference.cache import ContiguousCache
from mcore_inference.paired import PairedCache
from mcore_models import GPT, TokenBatch
from mcore_parallel import gather_logits

Cache = ContiguousCache | PairedCache
New = Sequence[tuple[int, list[int]]]
"""Ids of sequences, and their new tokens."""


class ModelRunner:
    """Runs a model over new tokens, with the earlier ones in a cache.

    All ranks of the model's mesh make the same calls. The model may be cut over tp; its vocabulary
    shards are gathered, so that every rank samples the same token.

    An encoder-decoder reads by its encoder the first tokens of a sequence, those of its first call;
    its decoder starts from `start_id` (of T5 the padding) and writes the others.

    Raises:
        ValueError: the mesh cuts the model in a way that generation does not run with, or the
            model's tokens see later ones, or `start_id` is no token.
    """

    def __init__(self, model: GPT, *, start_id: int = 0) -> None:
        config = model.mesh.config
        if config.pp > 1 or config.cp > 1 or config.sequence_parallel:
            raise ValueError(
                f"generation runs on tp and dp alone, not on {config.describe()}: "
                f"load the checkpoint with pp=1, cp=1 and without sequence parallelism"
            )
        if not model.config.attention.causal:
            raise ValueError(
                "generation goes from token to token, and this model's tokens see later ones "
                "(attention.causal=False): it encodes texts, and writes none"
            )
        if not 0 <= start_id < model.config.vocab_size:
            raise ValueError(
                f"start_id={start_id} is outside the model's vocabulary: "
                f"0 to {model.config.vocab_size - 1}"
            )
        self.model = model
        self.start_id = start_id

    @property
    def reads_source(self) -> bool:
        """Whether prompts are read by an encoder, and not continued."""
        return self.model.config.family == "t5"

    def make_cache(self) -> Cache:
        """Return an empty cache of the kind that the model needs."""
        return PairedCache() if self.reads_source else ContiguousCache()

    @torch.inference_mode()
    def __call__(self, new: New, cache: Cache, wanted: Sequence[int] | None = None) -> Tensor:
        """Return the logits [R, V] after the last new tokens of each of M sequences.

        All-gathers over the tensor-parallel group.

        Args:
            new: each sequence's id in the cache and its new tokens, at least one.
            cache: keys, values and states so far; extended by this pass.
            wanted: of how many of its last new tokens to give each sequence's logits; default 1.
                An encoder-decoder has no others.
        """
        device = next(self.model.parameters()).device
        if isinstance(cache, PairedCache):
            batch = self._paired(new, cache, device)
        else:
            starts = [cache.length(sequence) for sequence, _ in new]
            cache.begin([(sequence, len(tokens)) for sequence, tokens in new], device)
            batch = _batch(new, starts, device)
        counts = [1] * len(new) if self.reads_source else [len(tokens) for _, tokens in new]
        tails = zip(accumulate(counts), wanted or [1] * len(counts), strict=True)
        rows = torch.tensor([i for end, n in tails for i in range(end - n, end)], device=device)
        logits = self.model.stage_forward(batch, cache=cache, logits_at=rows)
        vocab_size = self.model.config.vocab_size
        return gather_logits(logits, self.model.mesh.tp, vocab_size=vocab_size)

    def _paired(self, new: New, cache: PairedCache, device: torch.device) -> TokenBatch:
        """What is written, and behind it the sources that are read now."""
        starts = [cache.written.length(sequence) for sequence, _ in new]
        begins = [not start for start in starts]
        read = [(i, tokens if b else []) for (i, tokens), b in zip(new, begins, strict=True)]
        start = [self.start_id]
        written = [(i, start if b else tokens) for (i, tokens), b in zip(new, begins, strict=True)]
        cache.begin(read, written, device)
        source = _batch(read, [0] * len(read), device)
        return dataclasses.replace(_batch(written, starts, device), source=source)


def _batch(new: New, starts: Sequence[int], device: torch.device) -> TokenBatch:
    """New tokens of sequences that have so many already."""
    counts = [len(tokens) for _, tokens in new]
    bounds = torch.tensor(list(accumulate(counts, initial=0)), device=device)
    ranges = (range(a, a + n) for a, n in zip(starts, counts, strict=True))
    tokens = [token for _, tokens in new for token in tokens]
    positions = [p for positions in ranges for p in positions]
    alike = len(set(counts)) == 1 and counts[0] > 0
    return TokenBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        cu_seqlens=bounds.to(torch.int32),
        max_seqlen=max(counts),
        uniform=(len(counts), counts[0]) if alike else None,
    )

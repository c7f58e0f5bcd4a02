"""One forward pass over the new tokens of several sequences.

T new tokens of M sequences, R logits wanted, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mcore_inference.cache import ContiguousCache
from mcore_models import GPT, TokenBatch
from mcore_parallel import gather_logits


class ModelRunner:
    """Runs a model over new tokens, with the earlier ones in a cache.

    All ranks of the model's mesh make the same calls. The model may be cut over tp; its vocabulary
    shards are gathered, so that every rank samples the same token.

    Raises:
        ValueError: the mesh cuts the model in a way that generation does not run with.
    """

    def __init__(self, model: GPT) -> None:
        config = model.mesh.config
        if config.pp > 1 or config.cp > 1 or config.sequence_parallel:
            raise ValueError(
                f"generation runs on tp and dp alone, not on {config.describe()}: "
                f"load the checkpoint with pp=1, cp=1 and without sequence parallelism"
            )
        if model.config.family == "t5":
            raise ValueError(
                "generation is that of decoders, and this model reads a source by an encoder (t5): "
                "its logits come from calling it with source=…"
            )
        if not model.config.attention.causal:
            raise ValueError(
                "generation goes from token to token, and this model's tokens see later ones "
                "(attention.causal=False): it encodes texts, and writes none"
            )
        self.model = model

    @torch.inference_mode()
    def __call__(
        self,
        new: Sequence[tuple[int, list[int]]],
        cache: ContiguousCache,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the logits [R, V] after the last new tokens of each of M sequences.

        All-gathers over the tensor-parallel group.

        Args:
            new: each sequence's id in the cache and its new tokens, at least one.
            cache: keys, values and states so far; extended by this pass.
            wanted: of how many of its last new tokens to give each sequence's logits; default 1.
        """
        device = next(self.model.parameters()).device
        starts = [cache.length(sequence) for sequence, _ in new]
        counts = [len(tokens) for _, tokens in new]
        bounds = torch.tensor(list(accumulate(counts, initial=0)), device=device)
        cache.begin([(sequence, len(tokens)) for sequence, tokens in new], device)
        ranges = (range(a, a + n) for a, n in zip(starts, counts, strict=True))
        batch = TokenBatch(
            tokens=torch.tensor([token for _, tokens in new for token in tokens], device=device),
            positions=torch.tensor([p for positions in ranges for p in positions], device=device),
            cu_seqlens=bounds.to(torch.int32),
            max_seqlen=max(counts),
            uniform=(len(counts), counts[0]) if len(set(counts)) == 1 else None,
        )
        tails = zip(accumulate(counts), wanted or [1] * len(counts), strict=True)
        rows = torch.tensor([i for end, n in tails for i in range(end - n, end)], device=device)
        logits = self.model.stage_forward(batch, cache=cache, logits_at=rows)
        vocab_size = self.model.config.vocab_size
        return gather_logits(logits, self.model.mesh.tp, vocab_size=vocab_size)

"""One forward pass over the new tokens of several sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_inference.cache import ContiguousCache
from mcore_models import GPT, TokenBatch
from mcore_parallel import ParallelMesh, gather_logits


class ModelRunner:
    """Runs a model over new tokens, with the earlier ones in a cache.

    All ranks of the mesh make the same calls. The model may be cut over tp; its vocabulary shards
    are gathered, so that every rank samples the same token.

    Raises:
        ValueError: the mesh cuts the model in a way that generation does not run with.
    """

    def __init__(self, model: GPT, mesh: ParallelMesh) -> None:
        config = mesh.config
        if config.pp > 1 or config.cp > 1 or config.sequence_parallel:
            raise ValueError(
                f"generation runs on tp and dp alone, not on {config.describe()}: "
                f"load the checkpoint with pp=1, cp=1 and without sequence parallelism"
            )
        self.model = model
        self.mesh = mesh

    @torch.inference_mode()
    def __call__(self, new_tokens: list[list[int]], cache: ContiguousCache) -> Tensor:
        """Return the logits [M, V] after the last new token of the M sequences that have any.

        Args:
            new_tokens: the new tokens of every sequence of the cache, empty where it has none.
            cache: keys and values so far; extended by this pass.
        """
        device = self.mesh.device
        starts = list(cache.lengths)
        counts = [len(tokens) for tokens in new_tokens]
        cache.begin(counts, device)
        active = [n for n, count in enumerate(counts) if count]
        flat = [token for tokens in new_tokens for token in tokens]
        positions = [p for n in active for p in range(starts[n], starts[n] + counts[n])]
        bounds = torch.tensor([0, *(counts[n] for n in active)]).cumsum(0)
        batch = TokenBatch(
            tokens=torch.tensor(flat, device=device),
            positions=torch.tensor(positions, device=device),
            cu_seqlens=bounds.to(device, torch.int32),
            max_seqlen=max(counts),
        )
        last = (bounds[1:] - 1).to(device)
        logits = self.model.stage_forward(batch, cache=cache, logits_at=last)
        return gather_logits(logits, self.mesh.tp, vocab_size=self.model.config.vocab_size)

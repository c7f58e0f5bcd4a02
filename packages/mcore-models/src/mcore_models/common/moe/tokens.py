"""What is known of the tokens that a rank routes. T tokens of the micro-batch, N of them here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_models.common.batch import TokenBatch
from mcore_parallel import Group, RngKey, all_reduce

VALID = 2
"""The worth of a token in the loss mask, see `RoutedTokens.worth`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedTokens:
    """N tokens of a micro-batch of a replica: those at `mine` of what this rank has of it.

    `tp` and `cp` are the ranks that route the others. `key` is that of the layer's randomness, None
    where nothing is random. `training` says whether what belongs to training alone is done.
    """

    batch: TokenBatch
    mine: slice
    tp: Group
    cp: Group
    key: RngKey | None = None
    training: bool = True

    def weights(self, dtype: torch.dtype) -> Tensor:
        """How much each counts [N]: its entry of the loss mask, 1 without."""
        if self.batch.loss_mask is not None:
            return self.batch.loss_mask[self.mine].to(dtype)
        return torch.ones_like(self.batch.tokens[self.mine], dtype=dtype)

    def worth(self) -> Tensor:
        """What goes before what [N], int64: `VALID` if it is in the loss mask, 1 for others of the
        data, 0 for those that only fill up a share of a document.
        """
        real = self.batch.real
        first = torch.ones_like(self.batch.tokens) if real is None else real.long()
        return torch.where(self.weights(torch.float64) > 0, VALID, first[self.mine])

    def documents(self) -> Tensor:
        """The document of each [N], counted from 0 and alike on all ranks of `tp` and `cp`."""
        return self.batch.documents()[self.mine]

    def rows(self) -> Tensor:
        """The number of each [N] in the whole data: `batch.rows`, else its place here."""
        if self.batch.rows is not None:
            return self.batch.rows[self.mine]
        size = self.batch.num_tokens
        return torch.arange(size, device=self.batch.tokens.device)[self.mine]

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks that route tokens of this micro-batch."""
        return all_reduce(all_reduce(x, self.tp), self.cp)

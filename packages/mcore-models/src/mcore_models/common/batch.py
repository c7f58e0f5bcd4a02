"""What goes through a model: a flat batch of tokens, and the counts that losses are divided by.

T tokens (sample b's position s of a [B, S] batch is token b·S+s), N documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor

from mcore_parallel.context import DocumentPadding

_PER_DOCUMENT = ("cu_seqlens", "document_labels")
"""Tensors of a batch that have no entry for every token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """One micro-batch as the model sees it: T tokens in a row, cut into N documents.

    Attention stays inside a document: `cu_seqlens` [N+1] int32 holds the bounds (FlashAttention's
    variable-length convention) and `max_seqlen` the longest, on the host so that no device
    synchronisation is needed. `uniform` = (B, S) says that all documents have length S.
    `tokens`, `positions`, `labels` are [T] int64, `loss_mask` [T] floating. `axis_positions`
    [T, A] int64 are positions in time, height and width for rotary positions in sections; without
    them a token has its position on every axis.
    `further_tokens` and `further_labels` [T, depths] int64 and `further_mask` [T, depths] are for
    multi-token prediction, see `look_ahead`.
    `rows` [T] int64 names each token globally (sample id · S + position): dropout masks are a
    function of it, so that they do not depend on how the batch lies over ranks.
    `token_types` [T] int64 are the segments of BERT, and `document_labels` [N] int64 say of each
    document whether its two segments are in order (0) or not (1), -1 where that is not asked.
    `source` is the encoder's micro-batch where this is the decoder's, document by document.
    `shares` = n says that this is one rank's share of every document, as `share` cuts it,
    `real` [T] bool which of its tokens are of the whole (all, without it), and `lengths` how long
    the whole documents are where some were filled up.
    """

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    uniform: tuple[int, int] | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    rows: Tensor | None = None
    axis_positions: Tensor | None = None
    further_tokens: Tensor | None = None
    further_labels: Tensor | None = None
    further_mask: Tensor | None = None
    token_types: Tensor | None = None
    document_labels: Tensor | None = None
    source: "TokenBatch | None" = None
    real: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    shares: int = 1

    def __post_init__(self) -> None:
        size = self.num_tokens
        for name in ("tokens", "positions", "labels", "loss_mask", "rows", "token_types", "real"):
            value: Tensor | None = getattr(self, name)
            if value is not None and value.shape != (size,):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)} in a batch of {size} tokens: "
                    f"give one flat row of shape ({size},)"
                )
        axes = self.axis_positions
        if axes is not None and (axes.dim() != 2 or axes.shape[0] != size):
            raise ValueError(
                f"axis_positions has shape {tuple(axes.shape)} in a batch of {size} tokens: "
                f"give the axes of each token, [{size}, axes]"
            )
        if self.uniform is not None and self.uniform[0] * self.uniform[1] != size:
            raise ValueError(f"uniform={self.uniform} does not describe {size} tokens")

    @property
    def num_tokens(self) -> int:
        """Tokens in this micro-batch, T."""
        return self.tokens.numel()

    @property
    def num_documents(self) -> int:
        """Documents in this micro-batch, N."""
        return self.cu_seqlens.numel() - 1

    def documents(self) -> Tensor:
        """The document of each token [T], counted from 0; tokens past the last belong to it."""
        index = torch.arange(self.num_tokens, device=self.tokens.device)
        document = torch.searchsorted(self.cu_seqlens.long(), index, right=True) - 1
        return document.clamp(max=max(self.num_documents - 1, 0))

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The same batch with every tensor on `device`."""
        tensors: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        if self.source is not None:
            tensors["source"] = self.source.to(device)
        return replace(self, **tensors)

    def share(self, rank: int, size: int, *, multiple: int = 1) -> Self:
        """What rank `rank` of `size` holds of every document under context parallelism.

        Documents are cut as `mcore_parallel.context.SequenceSplit` says. Where one is too short
        or uneven for that, unused tokens are added at its end, and at the end of the share until
        `multiple` divides its tokens: their loss mask is 0, and no real token sees them (`lengths`
        tell attention to later tokens of them). Positions and rows stay those of the whole;
        `cu_seqlens` and `max_seqlen` become those of the share. A label of a document is with the
        first rank, which has its first token; a source is shared likewise. Reads `cu_seqlens` from
        the device, unless `uniform`.

        Raises:
            ValueError: this is a share already, or `rank` is none of the `size`.
        """
        if self.shares > 1:
            raise ValueError(f"the batch is one of {self.shares} shares already: share the whole")
        if size == 1:
            return self
        if self.uniform is None:
            bounds: list[int] = self.cu_seqlens.tolist()
        else:
            samples, length = self.uniform
            bounds = [sample * length for sample in range(samples + 1)]
        padding = DocumentPadding(lengths=tuple(b - a for a, b in pairwise(bounds)), size=size)
        split = padding.split
        missing = -split.local_bounds[-1] % multiple
        filled = split.num_rows > self.num_tokens
        uneven = missing > 0 or filled
        tensors: dict[str, Tensor] = {
            f.name: value
            for f in fields(self)
            if f.name not in _PER_DOCUMENT and isinstance(value := getattr(self, f.name), Tensor)
        }
        if uneven:
            tensors["real"] = torch.ones_like(self.tokens, dtype=torch.bool)
            if self.loss_mask is None:
                tensors["loss_mask"] = torch.ones_like(self.tokens, dtype=torch.float32)
        for name, value in tensors.items():
            mine = split.take(padding.pad(value), rank)
            unused = mine.new_zeros(missing, *mine.shape[1:])
            tensors[name] = torch.cat([mine, unused]) if missing else mine
        if self.document_labels is not None:
            labels = self.document_labels
            tensors["document_labels"] = torch.full_like(labels, -1) if rank else labels
        source = self.source
        local = torch.tensor(split.local_bounds, dtype=torch.int32)
        uniform = self.uniform
        return replace(
            self,
            **cast(dict[str, Any], tensors),
            source=None if source is None else source.share(rank, size, multiple=multiple),
            lengths=padding.lengths if filled else None,
            cu_seqlens=local.to(self.cu_seqlens.device),
            max_seqlen=max((b - a for a, b in pairwise(split.local_bounds)), default=0),
            uniform=None if uniform is None or missing else (uniform[0], split.local_bounds[1]),
            shares=size,
        )

    def look_ahead(self, depths: int) -> Self:
        """The same batch with what predicting `depths` further tokens needs.

        In column k of `further_tokens` is the token k + 1 places on, and in that of
        `further_labels` and `further_mask` its label and whether this counts: 0 where there is no
        such token in the document, so that nothing is predicted across its end.

        Raises:
            ValueError: the batch has no labels, or is one of several shares: in the whole alone it
                is known what comes next.
        """
        if self.shares > 1:
            raise ValueError(
                f"predicting further tokens needs look_ahead({depths}) before the batch is cut "
                f"into {self.shares} shares"
            )
        if self.labels is None:
            raise ValueError("predicting further tokens needs labels, and the batch has none")
        places = torch.arange(self.num_tokens, device=self.tokens.device).unsqueeze(1)
        ahead = places + torch.arange(1, depths + 1, device=self.tokens.device)
        inside = ahead < self.cu_seqlens.long()[self.documents() + 1].unsqueeze(1)
        ahead = ahead.masked_fill(~inside, 0)
        mask = inside.to(torch.float32)
        return replace(
            self,
            further_tokens=self.tokens[ahead].masked_fill(~inside, 0),
            further_labels=self.labels[ahead].masked_fill(~inside, 0),
            further_mask=mask if self.loss_mask is None else self.loss_mask[ahead] * inside,
        )

    def at_depth(self, depth: int) -> Self:
        """The batch as it is at a depth of prediction: `look_ahead`'s columns are its tokens."""
        assert self.further_tokens is not None, "look_ahead comes before"
        assert self.further_labels is not None, "look_ahead comes before"
        assert self.further_mask is not None, "look_ahead comes before"
        return replace(
            self,
            tokens=self.further_tokens[:, depth],
            labels=self.further_labels[:, depth],
            loss_mask=self.further_mask[:, depth],
            further_tokens=None,
            further_labels=None,
            further_mask=None,
        )

    @staticmethod
    def from_samples(
        tokens: Tensor,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        positions: Tensor | None = None,
        sample_ids: Tensor | Sequence[int] | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> "TokenBatch":
        """The flat batch of B samples of length S: `tokens` [B, S], the others alike.

        `cu_seqlens` [N+1] gives the document bounds over the B·S tokens; without it every sample
        is one document. `max_seqlen` is read from it when not given (a device synchronisation).
        `sample_ids` [B] are the samples' numbers in the data set, for `rows`; default 0…B-1.
        Default positions count from 0 in every document.

        Raises:
            ValueError: when `tokens` is not two-dimensional or `cu_seqlens` does not cover it.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}: give [samples, length]")
        samples, length = tokens.shape
        device = tokens.device
        if cu_seqlens is None:
            uniform, max_seqlen = (samples, length), length
            bounds = torch.arange(samples + 1, dtype=torch.int32, device=device) * length
        else:
            uniform, bounds = None, cu_seqlens.to(device, torch.int32)
            max_seqlen = _checked_max(bounds, tokens.numel()) if max_seqlen is None else max_seqlen
        if positions is None:
            index = torch.arange(tokens.numel(), device=device)
            document = torch.searchsorted(bounds.long(), index, right=True) - 1
            positions = index - bounds.long()[document]
        ids = torch.as_tensor(range(samples) if sample_ids is None else sample_ids)
        rows = ids.to(device, torch.int64)[:, None] * length + torch.arange(length, device=device)
        return TokenBatch(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            cu_seqlens=bounds,
            max_seqlen=max_seqlen,
            uniform=uniform,
            labels=None if labels is None else labels.flatten(),
            loss_mask=None if loss_mask is None else loss_mask.flatten(),
            rows=rows.flatten(),
        )


@dataclass(frozen=True, kw_only=True)
class GlobalCounts:
    """Totals over the whole global batch (every micro-batch, every data-parallel rank).

    `tokens` is the number of valid tokens (the sum of all loss masks): losses are sums divided by
    it, so that they and their gradients do not depend on how the batch is cut. `documents` is that
    of documents with a label (`TokenBatch.document_labels`).
    """

    tokens: float | Tensor
    documents: float | Tensor = 0.0

    def mean(self, total: Tensor) -> Tensor:
        """`total`, a sum over some of the valid tokens, divided by their number in the batch.

        0 when the whole batch has no valid token, where the sum is 0 as well.
        """
        return _quotient(total, self.tokens)

    def mean_of_documents(self, total: Tensor) -> Tensor:
        """`total`, a sum over some of the labelled documents, divided by their number likewise."""
        return _quotient(total, self.documents)


def _quotient(total: Tensor, count: float | Tensor) -> Tensor:
    if isinstance(count, Tensor):
        return total / count.masked_fill(count == 0, 1)
    return total / (count or 1)


def _checked_max(bounds: Tensor, size: int) -> int:
    values: list[int] = bounds.tolist()
    lengths = [b - a for a, b in pairwise(values)]
    if not lengths or values[0] != 0 or values[-1] != size or min(lengths) < 0:
        raise ValueError(
            f"cu_seqlens must rise from 0 to {size}, the number of tokens; "
            f"it goes {values[:1]} … {values[-1:]}"
        )
    return max(lengths)

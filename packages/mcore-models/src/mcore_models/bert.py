"""BERT: an encoder with heads for masked tokens and for pairs of segments.

T tokens in N documents, t of them with hidden states here (T / tp under sequence parallelism), H
hidden, V vocabulary, v this rank's columns of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.common.dense import Dense
from mcore_models.common.embedding import TokenTypeEmbedding
from mcore_models.common.head_loss import TokenLogProbs, TokenLoss
from mcore_models.common.mlp import build_activation
from mcore_models.common.norm import build_norm
from mcore_models.config import ModelConfig
from mcore_models.gpt import GPT
from mcore_parallel import Init, RngKey, gather_from_group
from mcore_parallel.tensor import HeadUse, VocabParallelHead, gather_logits

PAIR_LOSS = "pair_loss"
"""The name of the loss of pairs of segments, as it is reported."""


class MaskedHead(VocabParallelHead):
    """Logits of the tokens behind masks: dense, activation and norm, then the vocabulary."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(
            config.hidden_size,
            config.vocab_size,
            group=build.tp,
            bias=True,
            tied=config.tied_embeddings,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self.dense = Dense(config, build, config.hidden_size)
        self.norm = build_norm(config, build, config.num_layers)
        self._activation = build_activation(config, build)

    def forward(
        self, x: Tensor, weight: Tensor | None = None, *, use: HeadUse | None = None
    ) -> Tensor:
        """Hidden states [t, H] to this rank's logits [T, v]; the rest as in the class above."""
        return super().forward(self.norm(self._activation(self.dense(x))), weight, use=use)


class Bert(GPT):
    """A bidirectional encoder: what `build_model` makes of a config with `bert`.

    Its stages and chunks are those of `GPT`. The last one has the masked head, or gives the last
    layer's hidden states [T, H] where there is none, and the pooler with the head of pairs. In
    training mode the loss of `batch.document_labels` is part of the gradient, divided by
    `GlobalCounts.documents`, and reported as `pair_loss`; it is not part of `loss`.
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, chunks: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(config, build, chunks)
        options = config.bert
        assert options is not None
        if self.is_first:
            self.token_type_embedding = TokenTypeEmbedding(config, build)
            self.embedding_norm = build_norm(config, build, 0)
        self.pooler: Dense | None = None
        self.binary_head: Dense | None = None
        if self.is_last and options.pooler:
            self.pooler = Dense(config, build, config.hidden_size, all_tokens=True)
        if self.is_last and options.pair_head:
            self.binary_head = Dense(config, build, 2, all_tokens=True)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        rng: RngKey | None = None,
        token_types: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] for `tokens` [B, S]; without a masked head hidden states [B, S, H].

        `token_types` [B, S] are 0 by default. Of sample b the first `lengths[b]` tokens are one
        document; the others are padding, which they do not see. All-gathers over the
        tensor-parallel group.

        Raises:
            ValueError: on a pipeline stage that is not the whole model.
        """
        self._check_whole("stage_forward")
        batch = padded_batch(tokens, lengths, positions=positions, token_types=token_types)
        out = self.stage_forward(batch, rng=rng)
        if self.lm_head is not None:
            out = gather_logits(out, self.mesh.tp, vocab_size=self.config.vocab_size)
        return out.view(*tokens.shape, -1)

    def encode(self, batch: TokenBatch, *, rng: RngKey | None = None) -> Tensor:
        """The last layer's hidden states [T, H] of all tokens, on every tensor-parallel rank.

        Raises:
            ValueError: on a pipeline stage that is not the whole model.
        """
        self._check_whole("stage_forward")
        self._check_call(batch, None, True)
        context = self._context(batch, rng, None, None)
        return self._all_tokens(self.layers(self._embed(context), context))

    def pool(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """One vector for each document, [N, H], of hidden states [T, H]: tanh of the pooler's.

        Raises:
            ValueError: the model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this model, or its last stage, has no pooler: use mean_pool")
        first = batch.cu_seqlens[:-1].long().clamp(max=max(len(hidden) - 1, 0))
        pooled: Tensor = self.pooler(hidden[first])
        return pooled.tanh()

    def pair_logits(self, pooled: Tensor) -> Tensor:
        """Logits [N, 2] of pooled vectors [N, H]: whether segments are in order (0) or not (1).

        Raises:
            ValueError: the model has no head of pairs.
        """
        if self.binary_head is None:
            raise ValueError("this model, or its last stage, has no head of pairs (bert.pair_head)")
        logits: Tensor = self.binary_head(pooled)
        return logits

    def auxiliary_losses(self, counts: GlobalCounts) -> AuxiliaryLosses:
        """A collector of the losses beside that of masked tokens, as in `GPT`."""
        names = super().auxiliary_losses(counts).names
        options = self.config.bert
        assert options is not None
        return AuxiliaryLosses(counts, (*names, *([PAIR_LOSS] if options.pair_head else [])))

    def _make_head(self, config: ModelConfig, build: BuildContext) -> nn.Module | None:
        assert config.bert is not None
        return MaskedHead(config, build) if config.bert.masked_head else None

    def _embed(self, context: TokenContext) -> Tensor:
        batch = context.batch
        types = torch.zeros_like(batch.tokens) if batch.token_types is None else batch.token_types
        hidden: Tensor = self._embed_tokens(batch.tokens) + self.token_type_embedding(
            self._local(types)
        )
        if self.config.position == "learned":
            hidden = hidden + self.position_embedding(self._local(batch.positions))
        hidden = self.embedding_norm(hidden)
        if context.dropout is not None:
            hidden = context.dropout(hidden, "embedding")
        return hidden

    def _finish(
        self, hidden: Tensor, context: TokenContext, main: TokenLoss | TokenLogProbs | None
    ) -> Tensor:
        hidden = super()._finish(hidden, context, main)
        labels, auxiliary = context.batch.document_labels, context.auxiliary
        if labels is None or auxiliary is None or self.binary_head is None:
            return hidden
        logits = self.pair_logits(self.pool(self._all_tokens(hidden), context.batch))
        losses = F.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="sum")
        loss = auxiliary.counts.mean_of_documents(losses)
        # Every tensor-parallel rank has all of it; it is counted once.
        counted = loss if self.mesh.tp.rank == 0 else torch.zeros_like(loss)
        return auxiliary.attach(hidden, PAIR_LOSS, loss, counted)

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        """[t, H] to [T, H], alike on every tensor-parallel rank; the gradient of mine is mine."""
        if not self.sequence_parallel:
            return hidden
        return gather_from_group(hidden, self.mesh.tp, 0)


def mean_pool(hidden: Tensor, batch: TokenBatch) -> Tensor:
    """The mean [N, H] of the hidden states [T, H] of each document; zeros for one without tokens.

    What sentence encoders such as all-MiniLM-L6-v2 take for the meaning of a text.

    Raises:
        ValueError: the hidden states are those of a share of the documents.
    """
    if batch.shares > 1:
        raise ValueError(
            f"the mean of a document needs all of it, and this is one of {batch.shares} shares: "
            f"use cp=1"
        )
    bounds = batch.cu_seqlens.long()
    inside = torch.arange(len(hidden), device=hidden.device) < bounds[-1]
    sums = hidden.new_zeros(batch.num_documents, hidden.shape[1])
    sums = sums.index_add(0, batch.documents(), hidden * inside.unsqueeze(1))
    return sums / bounds.diff().clamp(min=1).unsqueeze(1)


def padded_batch(
    tokens: Tensor,
    lengths: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    token_types: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    sample_ids: Tensor | None = None,
) -> TokenBatch:
    """The flat batch of `tokens` [B, S] of which the first `lengths` [B] of each sample are text.

    What follows them is a document of its own: the N = 2 · B documents are texts and paddings in
    turn, and texts alone, N = B, without `lengths`. The others as in `TokenBatch.from_samples`.

    Raises:
        ValueError: lengths that are not one of each sample.
    """
    samples, size = tokens.shape
    if lengths is not None and lengths.shape != (samples,):
        raise ValueError(f"lengths has shape {list(lengths.shape)}: give one of each, [{samples}]")
    if positions is None:
        positions = torch.arange(size, device=tokens.device).repeat(samples, 1)
    bounds = None
    if lengths is not None:
        starts = torch.arange(samples, device=tokens.device) * size
        bounds = torch.stack([starts, starts + lengths.to(tokens.device)], dim=1).flatten()
        bounds = torch.cat([bounds, bounds.new_tensor([samples * size])])
    batch = TokenBatch.from_samples(
        tokens,
        positions=positions,
        cu_seqlens=bounds,
        labels=labels,
        loss_mask=loss_mask,
        sample_ids=sample_ids,
    )
    return replace(batch, token_types=None if token_types is None else token_types.flatten())

"""The decoder-only language model, whole or one pipeline stage of it.

T tokens, B samples, S length, H hidden, V vocabulary, v this rank's (padded) share of it,
t = T / tp under sequence parallelism, else T.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mcore_kernels import LogitsChange, SoftCap
from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import KVCache, ResidualDropout, TokenContext
from mcore_models.common.decoder import Decoder
from mcore_models.common.embedding import PositionEmbedding
from mcore_models.common.head_loss import (
    TokenLogProbs,
    TokenLoss,
    in_chunks,
    of_logits,
    takes_chunks,
)
from mcore_models.common.latent_attention import latent_rotary
from mcore_models.common.moe import auxiliary_names
from mcore_models.common.mtp import PredictionDepth, loss_names
from mcore_models.common.norm import build_norm
from mcore_models.common.rope import local_rotary_angles, rotary_angles
from mcore_models.common.vocabulary import build_head, build_token_embedding
from mcore_models.config import ModelConfig
from mcore_parallel import GradSync, ParamSpec, RngKey, param_specs
from mcore_parallel.tensor import HeadUse, gather_logits


class GPT(nn.Module):
    """A stack of layers between a token embedding and a vocabulary head.

    Make it with `build_model`. As one pipeline stage of several it holds that stage's layers, in
    `chunks` that lie apart in the model; the first chunk of all has the embedding, the last the
    final norm, the head and what predicts further tokens in training. With tied embeddings or
    further predictions the last stage holds a copy of `embedding.weight`, which `specs` describes
    as a replica.
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, chunks: Sequence[Sequence[int]]
    ) -> None:
        super().__init__()
        self.chunks = tuple(tuple(layers) for layers in chunks)
        self.config = config
        self.mesh = build.mesh
        self.kernels = build.kernels
        self.sequence_parallel = build.sequence_parallel
        self.is_first = build.mesh.is_first_stage
        self.is_last = build.mesh.is_last_stage
        if self.is_first or (self.is_last and config.embeds_at_end):
            self.embedding = build_token_embedding(config, build)
        if self.is_first and config.position == "learned":
            self.position_embedding = PositionEmbedding(config, build)
        self.layers = Decoder(config, build, itertools.chain(*self.chunks))
        if self.is_last:
            self.final_norm = (
                nn.Identity()
                if config.norm_place == "sum"
                else build_norm(config, build, config.num_layers)
            )
            self.lm_head = self._make_head(config, build)
        depths = range(len(config.mtp_pattern) if self.is_last else 0)
        self.mtp = nn.ModuleDict({str(k): PredictionDepth(config, build, k) for k in depths})

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, *, rng: RngKey | None = None
    ) -> Tensor:
        """Logits [B, S, V] for `tokens` [B, S], each sample one document.

        `positions` [B, S] default to 0…S-1. `rng` is the key of this step's dropout, needed in
        training mode when the model has any. All-gathers logits over the tensor-parallel group.

        Raises:
            ValueError: on a pipeline stage that is not the whole model.
        """
        self._check_whole("stage_forward")
        batch = TokenBatch.from_samples(tokens, positions=positions)
        logits = self.stage_forward(batch, rng=rng)
        whole = gather_logits(logits, self.mesh.tp, vocab_size=self.config.vocab_size)
        return whole.view(*tokens.shape, -1)

    def stage_forward(
        self,
        batch: TokenBatch,
        hidden: Tensor | None = None,
        *,
        rng: RngKey | None = None,
        cache: KVCache | None = None,
        logits_at: Tensor | None = None,
        auxiliary: AuxiliaryLosses | None = None,
        chunk: int = -1,
        loss: TokenLoss | TokenLogProbs | None = None,
    ) -> Tensor:
        """Run this stage: the first one from `batch.tokens`, later ones from `hidden` [t, H].

        Returns hidden states [t, H] for the next stage or, on the last stage, this rank's logits
        [T, v]; columns past the vocabulary are padding (`vocab_parallel_cross_entropy` and
        `gather_logits` leave them out). Communicates over the tensor-parallel group.

        Args:
            batch: the tokens of the micro-batch, the same on all stages and tensor-parallel ranks.
            hidden: what the stage before returned.
            rng: key of this step's dropout; the same on all ranks.
            cache: what layers keep of earlier tokens; the batch then holds new tokens only.
            logits_at: [R] int64, the tokens whose logits are wanted (last stage; default all).
            auxiliary: takes the losses of this stage's layers, in training mode, and those of
                further tokens if the batch has labels; see `auxiliary_losses`. Without it there are
                none.
            chunk: which of this stage's chunks to run, default the last.
            loss: what the last stage returns instead of a batch with labels, a scalar or [T].

        Raises:
            ValueError: hidden states given to the first stage or missing on a later one; dropout
                without a key or rows; positions past the learned table; a number of tokens that
                sequence parallelism cannot cut.
        """
        chunk %= len(self.chunks)
        first = self.is_first and chunk == 0
        self._check_call(batch, hidden, first)
        context = self._context(batch, rng, cache, auxiliary)
        if first:
            hidden = self._embed(context)
        assert hidden is not None
        hidden = self.layers(hidden, context, self.chunks[chunk])
        if not self.is_last or chunk < len(self.chunks) - 1:
            return hidden
        hidden = self._finish(hidden, context, loss)
        if logits_at is not None:
            if self.sequence_parallel:
                raise ValueError(
                    f"logits_at needs all tokens on every rank: not with sequence parallelism over "
                    f"tp={self.mesh.tp.size}"
                )
            hidden = hidden[logits_at]
        return self._result(hidden, batch, loss)

    def _make_head(self, config: ModelConfig, build: BuildContext) -> nn.Module | None:
        """What makes logits of hidden states; None: these are the output."""
        return build_head(config, build)

    def _finish(
        self, hidden: Tensor, context: TokenContext, main: TokenLoss | TokenLogProbs | None
    ) -> Tensor:
        """What the head gets [t, H], with the losses beside its own attached."""
        hidden = self.final_norm(hidden)
        if self.mtp and context.auxiliary is not None and context.batch.labels is not None:
            chunk_tokens = None if main is None else main.chunk_tokens
            further = TokenLoss(counts=context.auxiliary.counts, chunk_tokens=chunk_tokens)
            hidden = self._predict_further(hidden, context, context.auxiliary, further)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [T, v] from normed hidden states [t, H]."""
        if self.lm_head is None:
            return hidden
        logits = self._head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _head(self, hidden: Tensor, **options: HeadUse) -> Tensor:
        if self.config.logit_scale != 1:
            hidden = hidden * self.config.logit_scale
        assert self.lm_head is not None
        tied = self.embedding.weight if self.config.tied_embeddings else None
        out: Tensor = self.lm_head(hidden, tied, **options)
        return out

    def _result(
        self, hidden: Tensor, batch: TokenBatch, wanted: TokenLoss | TokenLogProbs | None
    ) -> Tensor:
        """What is wanted of normed hidden states [t, H]; None: logits."""
        if wanted is None:
            return self._logits(hidden)
        head, kernels, size = self.lm_head, self.kernels, self.config.vocab_size
        if takes_chunks(head):
            return self._head(
                hidden, use=in_chunks(head, batch, wanted, kernels, self._logit_changes)
            )
        logits = self._logits(hidden)
        return of_logits(
            logits, batch, wanted, group=self.mesh.tp, kernels=kernels, vocab_size=size
        )

    @property
    def _logit_changes(self) -> tuple[LogitsChange, ...]:
        """What `_logits` does after the product."""
        cap = self.config.logit_softcap
        return () if cap is None else (SoftCap(cap),)

    def loss(
        self,
        batch: TokenBatch,
        hidden: Tensor | None = None,
        *,
        counts: GlobalCounts,
        rng: RngKey | None = None,
        auxiliary: AuxiliaryLosses | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_tokens: int | None = None,
        unit_gradient: bool = False,
    ) -> Tensor:
        """This micro-batch's share of the loss: sum of valid tokens' cross-entropy / counts.tokens.

        A scalar fp32, the same on every tensor-parallel rank, for the last stage. The shares of
        all micro-batches and data-parallel ranks add up to the mean over the global batch, and so
        do their gradients. `label_smoothing`, `z_loss`, `chunk_tokens` and `unit_gradient` are
        those of `TokenLoss`; logits are never whole, unless the head multiplies in few bits.

        In training mode the layers' auxiliary losses are part of the gradient, not of the value;
        `auxiliary` collects theirs (see `auxiliary_losses`). Smoothing and z-loss are part of both;
        further tokens go without.

        Raises:
            ValueError: when the batch has no labels, and what `stage_forward` raises.
        """
        if batch.labels is None:
            raise ValueError("the loss needs labels, and the batch has none")
        if self.lm_head is None:
            raise ValueError("the loss needs logits of tokens: set bert.masked_head")
        if auxiliary is None:
            auxiliary = self.auxiliary_losses(counts)
        loss = TokenLoss(
            counts=counts,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            chunk_tokens=chunk_tokens,
            unit_gradient=unit_gradient,
        )
        return self.stage_forward(batch, hidden, rng=rng, auxiliary=auxiliary, loss=loss)

    def log_probs(
        self,
        batch: TokenBatch,
        hidden: Tensor | None = None,
        *,
        rng: RngKey | None = None,
        auxiliary: AuxiliaryLosses | None = None,
        changes: Sequence[LogitsChange] = (),
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """ln p(label) [T] of the tokens in the loss mask, 0 of others, for the last stage.

        At least fp32, differentiable, the same on every tensor-parallel rank. `changes` are made to
        the model's logits before, such as a temperature; those and `chunk_tokens` are as in
        `TokenLogProbs`. Logits are never whole, as for `loss`.

        Raises:
            ValueError: when the batch has no labels, and what `stage_forward` raises.
        """
        if batch.labels is None:
            raise ValueError("log-probabilities need labels, and the batch has none")
        wanted = TokenLogProbs(changes=tuple(changes), chunk_tokens=chunk_tokens)
        return self.stage_forward(batch, hidden, rng=rng, auxiliary=auxiliary, loss=wanted)

    def _predict_further(
        self, hidden: Tensor, context: TokenContext, auxiliary: AuxiliaryLosses, of: TokenLoss
    ) -> Tensor:
        """Return `hidden` [t, H] with the losses of further tokens attached."""
        config, batch = self.config, context.batch
        assert config.mtp is not None
        if batch.further_tokens is None:
            batch = batch.look_ahead(config.mtp.num_depths)
        found = hidden
        for depth, (name, module) in enumerate(
            zip(loss_names(config), self.mtp.values(), strict=True)
        ):
            ahead = batch.at_depth(depth)
            embedded = self._embed_tokens(ahead.tokens)
            if context.dropout is not None:
                embedded = context.dropout(embedded, "mtp", depth)
            found = module(found, embedded, replace(context, batch=ahead))
            loss = self._result(found, ahead, of)
            # Every tensor-parallel rank has all of it; it is counted once.
            counted = loss if self.mesh.tp.rank == 0 else torch.zeros_like(loss)
            hidden = auxiliary.attach(hidden, name, loss * config.mtp.depth_weight, counted)
        return hidden

    def auxiliary_losses(self, counts: GlobalCounts) -> AuxiliaryLosses:
        """A collector of the losses that the model's layers add to the gradient.

        Pass one to every `stage_forward` and `loss` of a step, on every pipeline stage. Its names
        are those of the whole model, the same on every rank. Of the losses of further tokens
        (`mtp_loss_0`, …) it has the values before they are weighed.
        """
        names = (*auxiliary_names(self.config.moe), *loss_names(self.config))
        return AuxiliaryLosses(counts, names)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers here, in the order in which they run."""
        return list(self.layers.values())

    def specs(self) -> dict[str, ParamSpec]:
        """Layout, initial values and gradient synchronisation of every parameter here, by name.

        Replicas count over the tensor-parallel group and, for embeddings on two pipeline stages,
        over `mesh.embedding`, over which their gradients are to be summed.
        """
        specs = param_specs(self, tp=self.mesh.tp, sequence_parallel=self.sequence_parallel)
        ends = self.mesh.embedding
        if self.config.embeds_at_end and ends.size > 1:
            spec = specs["embedding.weight"]
            specs["embedding.weight"] = replace(
                spec,
                layout=spec.layout.replicated(ends.rank, ends.size),
                grad_sync=(*spec.grad_sync, GradSync(group=ends)),
            )
        return specs

    def _embed(self, context: TokenContext) -> Tensor:
        batch = context.batch
        hidden = self._embed_tokens(batch.tokens)
        if self.config.position == "learned":
            hidden = hidden + self.position_embedding(self._local(batch.positions))
        if context.dropout is not None:
            hidden = context.dropout(hidden, "embedding")
        return hidden

    def _embed_tokens(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        scale = self.config.embedding_scale
        # The factor is rounded as the vectors are: so have models been trained that have one.
        return hidden if scale == 1 else hidden * torch.tensor(scale, dtype=hidden.dtype)

    def _context(
        self,
        batch: TokenBatch,
        rng: RngKey | None,
        cache: KVCache | None,
        auxiliary: AuxiliaryLosses | None,
    ) -> TokenContext:
        config = self.config
        rotary, local, dropout = None, None, None
        if config.position == "rope" and config.num_heads:
            rotary = rotary_angles(config, batch, self.mesh.cp)
            local = local_rotary_angles(config, batch)
        if self.training and config.dropout:
            if rng is None or batch.rows is None:
                missing = "rng=RngKey(…)" if rng is None else "rows in the batch"
                raise ValueError(
                    f"dropout={config.dropout} in training mode needs {missing}; "
                    f"call eval() to run without dropout"
                )
            rows = self._local(batch.rows)
            dropout = ResidualDropout(probability=config.dropout, key=rng, rows=rows)
        return TokenContext(
            batch=batch,
            rotary=rotary,
            rotary_local=local,
            latent_rotary=latent_rotary(config, batch.positions),
            cache=cache,
            dropout=dropout,
            auxiliary=auxiliary if self.training else None,
            rng=rng if self.training else None,
        )

    def _local(self, rows: Tensor) -> Tensor:
        """The entries of `rows` [T] for the tokens whose hidden states are here [t]."""
        if not self.sequence_parallel:
            return rows
        size = rows.shape[0] // self.mesh.tp.size
        return rows[self.mesh.tp.rank * size :][:size]

    def _check_whole(self, instead: str) -> None:
        if not (self.is_first and self.is_last and len(self.chunks) == 1):
            raise ValueError(
                f"forward needs the whole model, and this is stage {self.mesh.pp.rank} of "
                f"{self.mesh.pp.size}: use {instead}"
            )

    def _check_call(self, batch: TokenBatch, hidden: Tensor | None, first: bool) -> None:
        if first != (hidden is None):
            wants = "starts from the tokens" if first else "needs the stage before's hidden"
            raise ValueError(f"stage {self.mesh.pp.rank} of {self.mesh.pp.size} {wants}")
        limit = self.config.max_positions
        longest = max(batch.lengths or (), default=batch.max_seqlen * batch.shares)
        if self.config.position == "learned" and longest > limit:
            raise ValueError(
                f"a document of {longest} tokens is longer than the position table: "
                f"at most max_positions={limit}"
            )

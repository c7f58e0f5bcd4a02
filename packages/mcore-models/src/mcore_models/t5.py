"""T5: an encoder, and a decoder that reads it.

T tokens of the decoder, M of the encoder, each in N documents, t and m of them with hidden states
on this rank (T / tp and M / tp under sequence parallelism); H hidden, V vocabulary, v this rank's
columns of it, Q this rank's heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_models.bert import padded_batch
from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.batch import GlobalCounts, TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import KVCache, ResidualDropout, TokenContext
from mcore_models.common.encoder_decoder import Stack, StackContext
from mcore_models.common.head_loss import TokenLogProbs, TokenLoss
from mcore_models.common.relative_bias import relative_bias
from mcore_models.common.text import PairedCache, Text
from mcore_models.common.vocabulary import build_head, build_token_embedding
from mcore_models.config import ModelConfig
from mcore_models.gpt import GPT
from mcore_parallel import RngKey
from mcore_parallel.context import HeadExchange
from mcore_parallel.tensor import gather_logits


@dataclass(frozen=True, kw_only=True, eq=False)
class _Passing:
    """What goes from stage to stage, in one tensor: both texts, and what all layers share.

    memory [m, H] and hidden [t, H] are hidden states of the encoder's and of the decoder's tokens;
    tables [2, buckets, Q] are the numbers of the biases of both stacks, so that these are
    parameters of the first stage alone, and their gradients come back as those of hidden states.
    """

    memory: Tensor
    hidden: Tensor
    tables: Tensor

    def join(self) -> Tensor:
        """[m + t + …, H]: the tables are the last rows, filled up with zeros."""
        width, flat = self.hidden.shape[1], self.tables.flatten()
        rows = F.pad(flat, (0, -len(flat) % width)).view(-1, width)
        return torch.cat([self.memory, self.hidden, rows])

    @staticmethod
    def split(joined: Tensor, tokens: tuple[int, int], tables: tuple[int, int]) -> "_Passing":
        """The inverse: tokens are (m, t), tables [buckets, Q]."""
        read, written = tokens
        memory, hidden, rows = joined.tensor_split((read, read + written))
        count = 2 * tables[0] * tables[1]
        return _Passing(
            memory=memory, hidden=hidden, tables=rows.flatten()[:count].view(2, *tables)
        )


class T5(GPT):
    """An encoder and a decoder over one embedding: what `build_model` makes of a config with `t5`.

    A micro-batch is the decoder's; `TokenBatch.source` is the encoder's, of whose documents the
    decoder's documents read the one of the same number. Pipeline stages hold the layers of the
    encoder, then those of the decoder. The first one embeds both texts; their hidden states go
    through the stages side by side, the decoder's unchanged until its layers come, the encoder's
    after its last for all that read them.
    """

    def __init__(
        self, config: ModelConfig, build: BuildContext, chunks: Sequence[Sequence[int]]
    ) -> None:
        nn.Module.__init__(self)
        assert config.t5 is not None
        self.chunks = tuple(tuple(layers) for layers in chunks)
        self.config = config
        self.mesh = build.mesh
        self.kernels = build.kernels
        self.sequence_parallel = build.sequence_parallel
        self.is_first = build.mesh.is_first_stage
        self.is_last = build.mesh.is_last_stage
        if self.is_first or (self.is_last and config.embeds_at_end):
            self.embedding = build_token_embedding(config, build)
        here = [layer for layers in self.chunks for layer in layers]
        self.encoder = Stack(
            config,
            build,
            self._encoders(here),
            name="encoder",
            begins=self.is_first,
            ends=config.num_layers - 1 in here,
        )
        self.decoder = Stack(
            config,
            build,
            self._decoders(here),
            name="decoder",
            begins=self.is_first,
            ends=self.is_last,
        )
        if self.is_last:
            self.lm_head = build_head(config, build)
        self._table = config.t5.num_buckets, config.num_heads // build.tp.size
        # One each: the plan of the last batch is kept.
        self._exchanges = HeadExchange(build.mesh.cp), HeadExchange(build.mesh.cp)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        rng: RngKey | None = None,
        source: Tensor | None = None,
        lengths: Tensor | None = None,
        source_lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] for the decoder's `tokens` [B, S], which read `source` [B, M].

        Of sample b the first `lengths[b]` and `source_lengths[b]` tokens are text, default all. All
        positions are relative: `positions` must be None. All-gathers over the tensor-parallel
        group.

        Raises:
            ValueError: there is no source, or there are positions; on a pipeline stage that is not
                the whole model.
        """
        self._check_whole("stage_forward")
        if source is None or positions is not None:
            raise ValueError("an encoder-decoder takes source, the encoder's tokens, no positions")
        batch = paired_batch(tokens, source, lengths=lengths, source_lengths=source_lengths)
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
        """This rank's logits [T, v] of the decoder's tokens; arguments as for `GPT`.

        A stage before the last returns what the next one needs: the hidden states of both texts
        and the tables of the biases, [m + t + rows, H]. With a `cache`, a `PairedCache`, batch and
        source hold new tokens alone: a source all of its, or none where it has been read.

        Raises:
            ValueError: the batch has no source, or as many documents as the source; a cache of one
                text; hidden states for the first stage, or none for a later one; dropout without a
                key.
        """
        chunk %= len(self.chunks)
        source = self._check_source(batch, cache)
        if cache is not None and not isinstance(cache, PairedCache):
            raise ValueError(
                "an encoder-decoder keeps two texts: give a cache with a source (PairedCache)"
            )
        first = self.is_first and chunk == 0
        self._check_call(batch, hidden, first)
        dropouts = self._dropout(source, rng), self._dropout(batch, rng)
        if first:
            passing = self._embed_both(source, batch, dropouts)
        else:
            assert hidden is not None
            tokens = len(self._local(source.tokens)), len(self._local(batch.tokens))
            passing = _Passing.split(hidden, tokens, self._table)
        passing = self._run(passing, (source, batch), dropouts, self.chunks[chunk], cache)
        if not self.is_last or chunk < len(self.chunks) - 1:
            return passing.join()
        out = self.decoder.finish(passing.hidden, dropouts[1])
        if logits_at is not None:
            if self.sequence_parallel:
                raise ValueError(
                    f"logits_at needs all tokens on every rank: not with sequence parallelism over "
                    f"tp={self.mesh.tp.size}"
                )
            out = out[logits_at]
        return self._result(out, batch, loss)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of both stacks, in the order in which they run."""
        return [*self.encoder.layers.values(), *self.decoder.layers.values()]

    def auxiliary_losses(self, counts: GlobalCounts) -> AuxiliaryLosses:
        """A collector of losses beside that of tokens, of which there are none."""
        return AuxiliaryLosses(counts)

    def _encoders(self, layers: Sequence[int]) -> list[int]:
        """Those of the encoder, counted in it, among layers of the whole model."""
        return [layer for layer in layers if layer < self.config.num_layers]

    def _decoders(self, layers: Sequence[int]) -> list[int]:
        count = self.config.num_layers
        return [layer - count for layer in layers if layer >= count]

    def _embed_both(
        self,
        source: TokenBatch,
        batch: TokenBatch,
        dropouts: tuple[ResidualDropout | None, ResidualDropout | None],
    ) -> _Passing:
        stacks = self.encoder, self.decoder
        memory, hidden = (
            stack.begin(self._embed_tokens(text.tokens), dropout)
            for stack, text, dropout in zip(stacks, (source, batch), dropouts, strict=True)
        )
        tables = torch.stack([stack.relative_bias() for stack in stacks])
        return _Passing(memory=memory, hidden=hidden, tables=tables)

    def _run(
        self,
        passing: _Passing,
        batches: tuple[TokenBatch, TokenBatch],
        dropouts: tuple[ResidualDropout | None, ResidualDropout | None],
        layers: Sequence[int],
        cache: PairedCache | None,
    ) -> _Passing:
        """Run layers of the model, those of the encoder before those of the decoder."""
        assert self.config.t5 is not None
        (source, batch), memory, hidden = batches, passing.memory, passing.hidden
        read, text = (
            Text.of(texts, exchange)
            for texts, exchange in zip(batches, self._exchanges, strict=True)
        )
        upper = self._encoders(layers)
        if upper and (cache is None or source.num_tokens):
            table = read.my_heads(passing.tables[0])
            bias = relative_bias(table, read.max_seqlen, self.config.t5, causal=False)
            context = StackContext(batch=source, text=read, bias=bias, dropout=dropouts[0])
            memory = self.encoder(memory, context, upper)
            if upper[-1] == self.config.num_layers - 1:
                memory = self.encoder.finish(memory, dropouts[0])
        if lower := self._decoders(layers):
            table = text.my_heads(passing.tables[1])
            longest = text.max_seqlen if cache is None else int(batch.positions.max()) + 1
            context = StackContext(
                batch=batch,
                text=text,
                bias=relative_bias(table, longest, self.config.t5, causal=True),
                memory=memory,
                read=read,
                dropout=dropouts[1],
                cache=cache,
            )
            hidden = self.decoder(hidden, context, lower)
        return replace(passing, memory=memory, hidden=hidden)

    def _check_source(self, batch: TokenBatch, cache: KVCache | None) -> TokenBatch:
        source = batch.source
        if source is None:
            raise ValueError("an encoder-decoder reads batch.source, and the batch has none")
        if source.num_documents != batch.num_documents:
            raise ValueError(
                f"the source has {source.num_documents} documents and the batch that reads it "
                f"{batch.num_documents}: give one for each"
            )
        for text in (source, batch):
            TokenContext(batch=text, cache=cache).check_shares(self.mesh.cp.size)
        return source

    def _dropout(self, batch: TokenBatch, rng: RngKey | None) -> ResidualDropout | None:
        return self._context(batch, rng, None, None).dropout


def paired_batch(
    tokens: Tensor,
    source: Tensor,
    *,
    lengths: Tensor | None = None,
    source_lengths: Tensor | None = None,
) -> TokenBatch:
    """The flat batch of a decoder's `tokens` [B, S] with the encoder's `source` [B, M].

    Of sample b the first `lengths[b]` and `source_lengths[b]` tokens are text; where either is
    given, both have N = 2 · B documents, texts and what follows them in turn (`padded_batch`).
    """
    if lengths is not None or source_lengths is not None:
        whole = tokens.new_full((len(tokens),), tokens.shape[1])
        lengths = whole if lengths is None else lengths
        whole = whole.new_full(whole.shape, source.shape[1])
        source_lengths = whole if source_lengths is None else source_lengths
    read = padded_batch(source, source_lengths)
    return replace(padded_batch(tokens, lengths), source=read)

"""T5: an encoder, and a decoder that reads it.

T tokens of the decoder, M of the encoder, each in N documents; H hidden, V vocabulary, v this
rank's columns of it.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from mcore_models.bert import padded_batch
from mcore_models.common.auxiliary import AuxiliaryLosses
from mcore_models.common.batch import GlobalCounts, KVCache, ResidualDropout, TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.encoder_decoder import Stack
from mcore_models.config import ModelConfig
from mcore_models.gpt import GPT, build_head, build_token_embedding
from mcore_parallel import ParamSpec, RngKey, param_specs
from mcore_parallel.tensor import gather_logits


class T5(GPT):
    """An encoder and a decoder over one embedding: what `build_model` makes of a config with `t5`.

    A micro-batch is the decoder's; `TokenBatch.source` is the encoder's, of whose documents the
    decoder's documents read the one of the same number. It is one pipeline stage.
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
        self.is_first = self.is_last = True
        self.embedding = build_token_embedding(config, build)
        below = config.t5.num_decoder_layers or config.num_layers
        self.encoder = Stack(
            config, build, name="encoder", num_layers=config.num_layers, reads=False
        )
        self.decoder = Stack(config, build, name="decoder", num_layers=below, reads=True)
        self.lm_head = build_head(config, build)

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
            ValueError: there is no source, or there are positions.
        """
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
    ) -> Tensor:
        """This rank's logits [T, v] of the decoder's tokens; arguments as for `GPT`.

        Raises:
            ValueError: the batch has no source, or as many documents as the source; hidden states,
                or a cache; dropout without a key.
        """
        source = batch.source
        if source is None:
            raise ValueError("an encoder-decoder reads batch.source, and the batch has none")
        if source.num_documents != batch.num_documents:
            raise ValueError(
                f"the source has {source.num_documents} documents and the batch that reads it "
                f"{batch.num_documents}: give one for each"
            )
        if hidden is not None or cache is not None:
            raise ValueError("an encoder-decoder is one stage, and keeps nothing of earlier tokens")
        dropped = self._dropout(source, rng)
        memory = self.encoder(self._embed_tokens(source.tokens), source, dropout=dropped)
        out = self.decoder(
            self._embed_tokens(batch.tokens),
            batch,
            memory=memory,
            memory_batch=source,
            dropout=self._dropout(batch, rng),
        )
        if logits_at is not None:
            if self.sequence_parallel:
                raise ValueError(
                    f"logits_at needs all tokens on every rank: not with sequence parallelism over "
                    f"tp={self.mesh.tp.size}"
                )
            out = out[logits_at]
        return self._logits(out)

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers of both stacks, in the order in which they run."""
        return [*self.encoder.layers.values(), *self.decoder.layers.values()]

    def auxiliary_losses(self, counts: GlobalCounts) -> AuxiliaryLosses:
        """A collector of losses beside that of tokens, of which there are none."""
        return AuxiliaryLosses(counts)

    def specs(self) -> dict[str, ParamSpec]:
        """Layout, initial values and gradient synchronisation of every parameter, by name."""
        return param_specs(self, tp=self.mesh.tp, sequence_parallel=self.sequence_parallel)

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

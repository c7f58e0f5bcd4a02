"""The layers of an encoder and of a decoder that reads it.

T tokens here, t of them with hidden states (T / tp under sequence parallelism), M tokens of the
encoder, H hidden, D head size, Q heads of this rank.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from mcore_models.common.batch import ResidualDropout, TokenBatch, TokenContext
from mcore_models.common.builder import BuildContext
from mcore_models.common.mlp import MLP
from mcore_models.common.norm import build_norm
from mcore_models.common.relative_bias import RelativeBias, biased_attention
from mcore_models.config import ModelConfig
from mcore_parallel import Init
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear


@dataclass(frozen=True, kw_only=True, eq=False)
class StackContext:
    """What the layers of a stack share: its batch, the bias [Q, L, L], and what it reads.

    `memory` are hidden states [m, H] of the encoder for the tokens of `memory_batch`, whose
    document n the decoder's document n reads; None in the encoder.
    """

    batch: TokenBatch
    bias: Tensor
    memory: Tensor | None = None
    memory_batch: TokenBatch | None = None
    dropout: ResidualDropout | None = None


class _Projections(nn.Module):
    """The linear layers of attention: their options, and heads of rows."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self._heads, self._size = config.num_heads, config.head_size
        self._hidden = config.hidden_size
        self._scale = config.attention.scale or config.head_size**-0.5
        self._build, self._std = build, config.init_std
        self.o = RowParallelLinear(
            self._heads * self._size,
            self._hidden,
            group=build.tp,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )

    def _column(self, *names: str) -> ColumnParallelLinear:
        build = self._build
        return ColumnParallelLinear(
            self._hidden,
            parts=[Part(name, self._heads, self._size) for name in names],
            group=build.tp,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=self._std),
            device=build.device,
            dtype=build.dtype,
        )

    def _split(self, rows: Tensor, count: int) -> tuple[Tensor, ...]:
        """[T, count · Q · D] as `count` times [T, Q, D]."""
        return rows.view(len(rows), count, -1, self._size).unbind(1)


class BiasedSelfAttention(_Projections):
    """Self-attention within each document, with a bias for each distance: [t, H] to [t, H].

    Split over heads, as `Attention`. Communicates over the tensor-parallel group.
    """

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.qkv = self._column("q", "k", "v")

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """Mix the tokens of each document."""
        q, k, v = self._split(self.qkv(hidden), 3)
        mixed = biased_attention(q, k, v, context.bias, context.batch, scale=self._scale)
        out: Tensor = self.o(mixed.flatten(1))
        return out


class CrossAttention(_Projections):
    """Queries of the decoder over the encoder's hidden states: [t, H] to [t, H].

    Document n of the one sees document n of the other, all of it. Split over heads; communicates
    over the tensor-parallel group.
    """

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.query = self._column("q")
        self.kv = self._column("k", "v")
        self._attention = build.kernels.attention

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """Read what the encoder says."""
        assert context.memory is not None
        assert context.memory_batch is not None
        (q,) = self._split(self.query(hidden), 1)
        k, v = self._split(self.kv(context.memory), 2)
        mixed, _ = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=context.batch.cu_seqlens,
            cu_seqlens_k=context.memory_batch.cu_seqlens,
            max_seqlen_q=context.batch.max_seqlen,
            max_seqlen_k=context.memory_batch.max_seqlen,
            causal=False,
            scale=self._scale,
        )
        out: Tensor = self.o(mixed.flatten(1))
        return out


class StackLayer(nn.Module):
    """hidden + part(norm(hidden)) for attention, cross-attention where it reads, and the MLP."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, layer_index: int, *, stack: str, reads: bool
    ) -> None:
        super().__init__()
        self._place = stack, layer_index
        self.input_norm = build_norm(config, build, layer_index)
        self.attention = BiasedSelfAttention(config, build)
        if reads:
            self.cross_norm = build_norm(config, build, layer_index)
            self.cross_attention = CrossAttention(config, build)
        self.post_norm = build_norm(config, build, layer_index)
        self.mlp = MLP(config, build, layer_index)
        self._reads = reads

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """[t, H] to [t, H]."""
        hidden = self._add(
            hidden, self.attention(self.input_norm(hidden), context), context, "attention"
        )
        if self._reads:
            read = self.cross_attention(self.cross_norm(hidden), context)
            hidden = self._add(hidden, read, context, "cross_attention")
        plain = TokenContext(batch=context.batch)
        return self._add(hidden, self.mlp(self.post_norm(hidden), plain), context, "mlp")

    def _add(self, hidden: Tensor, out: Tensor, context: StackContext, part: str) -> Tensor:
        if context.dropout is not None:
            out = context.dropout(out, *self._place, part)
        return hidden + out


class Stack(nn.Module):
    """The layers of an encoder, or of a decoder that reads one, their bias and their last norm."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, *, name: str, num_layers: int, reads: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.relative_bias = RelativeBias(config, build, causal=reads)
        self.layers = nn.ModuleDict(
            {
                str(index): StackLayer(config, build, index, stack=name, reads=reads)
                for index in range(num_layers)
            }
        )
        self.final_norm = build_norm(config, build, num_layers)

    def forward(
        self,
        hidden: Tensor,
        batch: TokenBatch,
        *,
        memory: Tensor | None = None,
        memory_batch: TokenBatch | None = None,
        dropout: ResidualDropout | None = None,
    ) -> Tensor:
        """Embeddings [t, H] to normed hidden states [t, H]."""
        context = StackContext(
            batch=batch,
            bias=self.relative_bias(batch.max_seqlen),
            memory=memory,
            memory_batch=memory_batch,
            dropout=dropout,
        )
        if dropout is not None:
            hidden = dropout(hidden, self.name, "embedding")
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        out: Tensor = self.final_norm(hidden)
        return out if dropout is None else dropout(out, self.name, "final_norm")

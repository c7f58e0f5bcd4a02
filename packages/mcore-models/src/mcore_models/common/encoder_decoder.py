"""The layers of an encoder and of a decoder that reads it.

T tokens here, t of them with hidden states (T / tp under sequence parallelism), H hidden, D head
size, Q heads of this rank; under context parallelism T are a share of every document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from mcore_models.common.batch import TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import ResidualDropout, TokenContext
from mcore_models.common.mlp import MLP
from mcore_models.common.norm import build_norm
from mcore_models.common.recompute import recomputed_attention
from mcore_models.common.relative_bias import (
    RelativeBias,
    biased_attention,
    biased_decoding,
)
from mcore_models.common.text import PairedCache, Text
from mcore_models.config import ModelConfig
from mcore_parallel import AttentionOp, Init
from mcore_parallel.recompute import recompute, recompute_output
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear

_STEPS = (
    ("input_norm", "attention"),
    ("cross_norm", "cross_attention"),
    ("post_norm", "mlp"),
)
"""The parts of a layer behind their norms; an encoder's has no cross-attention."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StackContext:
    """What the layers of a stack share: its batch and documents, the bias, and what it reads.

    `bias` is [heads, L, L], of the heads with which this rank attends. `memory` are hidden states
    [m, H] of the encoder for the tokens of `read`, whose document n the decoder's document n
    reads; None in the encoder. `cache` is what the decoder's layers keep of earlier tokens; `bias`
    then goes as far as the longest document with all of these.
    """

    batch: TokenBatch
    text: Text
    bias: Tensor
    memory: Tensor | None = None
    read: Text | None = None
    dropout: ResidualDropout | None = None
    cache: PairedCache | None = None


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
        heads = rows.shape[1] // (count * self._size)
        return rows.view(len(rows), count, heads, self._size).unbind(1)


class BiasedSelfAttention(_Projections):
    """Self-attention within each document, with a bias for each distance: [t, H] to [t, H].

    Split over heads, as `Attention`. Communicates over the tensor-parallel group, and over the
    context-parallel one, whose ranks exchange their heads for rows.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__(config, build)
        self.layer_index = layer_index
        self.qkv = self._column("q", "k", "v")
        self._again = build.recompute.recomputes("core_attn")

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """Mix the tokens of each document."""
        text, cache = context.text, context.cache
        q, k, v = text.to_heads(*self._split(self.qkv(hidden), 3))
        if cache is not None:
            return self._decode(q, k, v, context, cache)
        attend = partial(biased_attention, text=text, scale=self._scale)
        bias = context.bias
        mixed = recompute(attend, q, k, v, bias) if self._again else attend(q, k, v, bias)
        out: Tensor = self.o(text.to_rows(mixed).flatten(1))
        return out

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, context: StackContext, cache: PairedCache
    ) -> Tensor:
        """New tokens see the cached ones, too."""
        k, v, bounds, longest = cache.extend(self.layer_index, k, v)
        whole = Text(cu_seqlens=bounds, max_seqlen=longest)
        mixed = biased_decoding(
            q, k, v, context.bias, new=context.text, whole=whole, scale=self._scale
        )
        out: Tensor = self.o(mixed.flatten(1))
        return out


class CrossAttention(_Projections):
    """Queries of the decoder over the encoder's hidden states: [t, H] to [t, H].

    Document n of the one sees document n of the other, all of it. Split over heads; communicates
    as `BiasedSelfAttention` does.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__(config, build)
        self.layer_index = layer_index
        self.query = self._column("q")
        self.kv = self._column("k", "v")
        self._attention: AttentionOp = build.kernels.attention
        if build.recompute.recomputes("core_attn"):
            self._attention = recomputed_attention(self._attention)

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """Read what the encoder says."""
        assert context.memory is not None
        assert context.read is not None
        text, read = context.text, context.read
        (q,) = text.to_heads(*self._split(self.query(hidden), 1))
        k, v = read.to_heads(*self._split(self.kv(context.memory), 2))
        bounds, longest = read.cu_seqlens, read.max_seqlen
        if context.cache is not None:
            k, v, bounds, longest = context.cache.source.extend(self.layer_index, k, v)
        mixed, _ = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=text.cu_seqlens,
            cu_seqlens_k=bounds,
            max_seqlen_q=text.max_seqlen,
            max_seqlen_k=longest,
            causal=False,
            scale=self._scale,
        )
        out: Tensor = self.o(text.to_rows(mixed).flatten(1))
        return out


class StackLayer(nn.Module):
    """hidden + part(norm(hidden)) for attention, cross-attention where it reads, and the MLP."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, layer_index: int, *, stack: str, reads: bool
    ) -> None:
        super().__init__()
        self._place = stack, layer_index
        self._norm_again = build.recompute.recomputes("norm")
        self._mlp_again = build.recompute.recomputes("mlp")
        self.input_norm = build_norm(config, build, layer_index)
        self.attention = BiasedSelfAttention(config, build, layer_index)
        if reads:
            self.cross_norm = build_norm(config, build, layer_index)
            self.cross_attention = CrossAttention(config, build, layer_index)
        self.post_norm = build_norm(config, build, layer_index)
        self.mlp = MLP(config, build, layer_index)
        self._steps = [step for step in _STEPS if reads or step[0] != "cross_norm"]

    def forward(self, hidden: Tensor, context: StackContext) -> Tensor:
        """[t, H] to [t, H]."""
        for name, part in self._steps:
            norm, run = self.get_submodule(name), partial(self._run, part, context)
            if part == "mlp" and self._mlp_again:
                run = partial(recompute, run)
            again = self._norm_again
            out = recompute_output(norm, hidden, run) if again else run(norm(hidden))
            if context.dropout is not None:
                out = context.dropout(out, *self._place, part)
            hidden = hidden + out
        return hidden

    def _run(self, name: str, context: StackContext, normed: Tensor) -> Tensor:
        part = self.get_submodule(name)
        asked = TokenContext(batch=context.batch) if name == "mlp" else context
        out: Tensor = part(normed, asked)
        return out


class Stack(nn.Module):
    """The layers of an encoder, or of a decoder that reads one, that a pipeline stage holds.

    layers: their indices in the stack. begins, ends: whether the table of the bias and the last
    norm of the stack are here, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        layers: Sequence[int],
        *,
        name: str,
        begins: bool,
        ends: bool,
    ) -> None:
        super().__init__()
        self.name, self.reads = name, name == "decoder"
        self._recompute = build.recompute
        self._spread = build.tp if build.recompute.spread else None
        if begins:
            self.relative_bias = RelativeBias(config, build)
        self.layers = nn.ModuleDict(
            {
                str(index): StackLayer(config, build, index, stack=name, reads=self.reads)
                for index in layers
            }
        )
        if ends:
            self.final_norm = build_norm(config, build, config.num_layers)

    def begin(self, embedded: Tensor, dropout: ResidualDropout | None) -> Tensor:
        """What the first layer gets of embeddings [t, H]."""
        return embedded if dropout is None else dropout(embedded, self.name, "embedding")

    def forward(self, hidden: Tensor, context: StackContext, layers: Sequence[int]) -> Tensor:
        """Run these layers in order: [t, H] to [t, H]."""
        for again, group in self._recompute.groups(list(map(str, layers))):
            run = partial(self._run, group, context)
            hidden = recompute(run, hidden, spread=self._spread) if again else run(hidden)
        return hidden

    def finish(self, hidden: Tensor, dropout: ResidualDropout | None) -> Tensor:
        """Norm what the last layer gives, [t, H]."""
        out: Tensor = self.final_norm(hidden)
        return out if dropout is None else dropout(out, self.name, "final_norm")

    def _run(self, names: list[str], context: StackContext, hidden: Tensor) -> Tensor:
        for name in names:
            hidden = self.layers[name](hidden, context)
        return hidden

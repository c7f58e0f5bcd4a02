"""Self-attention. T tokens, H hidden, D head size; Q query and K kv heads, those of this rank."""

from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.common.builder import BuildContext
from mcore_models.common.context import TokenContext
from mcore_models.common.norm import build_qk_norm
from mcore_models.common.recompute import recomputed_attention
from mcore_models.config import ModelConfig
from mcore_parallel import AttentionOp, Init, ParamSpec
from mcore_parallel.context import context_attention
from mcore_parallel.spec import join
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear, fused_spec


class Attention(nn.Module):
    """Grouped-query self-attention within each document, causal or not: [T, H] to [T, H].

    `AttentionConfig` says what it does besides. Queries and keys are normed, then turned by their
    positions, as the layer's kind (local, without positions) says.

    Split over heads: the local weight holds this rank's q, k and v rows, whose global names are
    `attention.{q,k,v}.weight`, and `attention.gate.weight` where the output has a gate; with fewer
    kv heads than ranks a kv head lies on several ranks.
    Communicates over the tensor-parallel group (Shoeybi et al., "Megatron-LM", 2019), and over the
    context-parallel group, whose ranks hold shares of each document, in the way that
    `ParallelConfig.context_kind` gives this layer.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_heads, config.kv_heads, config.head_size
        options = config.attention
        self.layer_index = layer_index
        self.head_size = size
        parts = [Part("q", heads, size), Part("k", kv_heads, size), Part("v", kv_heads, size)]
        if options.gate:
            parts.append(Part("gate", heads, size))
        self._local_heads = [part.local_features(build.tp.size) // size for part in parts]
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            parts=parts,
            group=build.tp,
            bias=config.qkv_bias,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self.o = RowParallelLinear(
            heads * size,
            config.hidden_size,
            group=build.tp,
            bias=config.output_bias,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self.q_norm = build_qk_norm(config, build, heads)
        self.k_norm = build_qk_norm(config, build, kv_heads)
        self.sinks: nn.Parameter | None = None
        self._sinks = Part("sinks", heads)
        if options.sinks:
            blank = torch.empty(self._local_heads[0], dtype=build.dtype, device=build.device)
            self.sinks = nn.Parameter(blank)
        self._tp, self._init = build.tp, Init(kind="normal", std=config.init_std)
        self._scores: dict[str, Any] = {
            "causal": options.causal,
            "window": options.window_of(layer_index),
            "scale": options.scale,
            "softcap": options.softcap,
        }
        self._turns = layer_index not in options.nope_layers
        self._is_local = options.is_local(layer_index)
        self._interleaved = config.rope.interleaved
        self._rope = build.kernels.rope
        self._shares = build.mesh.cp.size
        self._attention: AttentionOp = build.kernels.attention
        if self._shares > 1:
            kind = build.mesh.config.context_kind_of(layer_index)
            self._attention = build.shared(
                kind, lambda: context_attention(kind, build.mesh.cp, build.kernels.attention)
            )
        if build.recompute.recomputes("core_attn"):
            self._attention = recomputed_attention(self._attention)

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H]; with a cache in `context`, new tokens also see the cached ones.

        Raises:
            ValueError: the batch is not this rank's share, or there is a cache for shares.
        """
        context.check_shares(self._shares)
        rows: Tensor = self.qkv(hidden)
        heads = rows.view(rows.shape[0], -1, self.head_size)
        q, k, v, *gate = torch.split(heads, self._local_heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if (angles := self._angles(context)) is not None:
            q, k = self._rope(q, k, *angles, self._interleaved)
        batch = context.batch
        uniform = batch.uniform
        cu_seqlens_k, max_seqlen_k = batch.cu_seqlens, batch.max_seqlen
        if context.cache is not None:
            if not self._scores["causal"]:
                raise ValueError("tokens that see later ones (attention.causal) cannot be cached")
            k, v, cu_seqlens_k, max_seqlen_k = context.cache.extend(self.layer_index, k, v)
            uniform = None
        options = dict(self._scores)
        if self._shares > 1 and not options["causal"]:
            options["lengths"] = batch.lengths
        mixed, _ = self._attention(
            q,
            k,
            v,
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_k=max_seqlen_k,
            uniform=uniform,
            sinks=self.sinks,
            **options,
        )
        if gate:
            mixed = mixed * gate[0].sigmoid()
        out: Tensor = self.o(mixed.flatten(1))
        return out

    def _angles(self, context: TokenContext) -> tuple[Tensor, Tensor] | None:
        """cos and sin of this layer's positions; None where it has none."""
        if not self._turns:
            return None
        if self._is_local and context.rotary_local is not None:
            return context.rotary_local
        return context.rotary

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `sinks`, global `<prefix>.sinks` [Q of all ranks]."""
        if self.sinks is None:
            return {}
        named = {join(prefix, "sinks"): self._sinks}
        return {"sinks": fused_spec(named, self._tp, init=self._init)}

"""The gated delta net (Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464).

T tokens, H hidden, K key heads of D channels, h value heads of Dv channels, those of this rank; W
taps of the convolution, B documents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_kernels import accumulation_dtype
from mcore_models.common.builder import BuildContext
from mcore_models.common.causal_conv import CausalConv, Documents
from mcore_models.common.context import TokenContext
from mcore_models.common.norm import HeadRMSNorm
from mcore_models.config import ModelConfig
from mcore_parallel import Init, ParamSpec
from mcore_parallel.context import HeadExchange
from mcore_parallel.spec import join
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear, fused_spec

_LEAST_LENGTH = 1e-6  # under the root of the length of queries and keys


class DeltaNet(nn.Module):
    """Linear attention that corrects what it remembers, within each document: [T, H] to [T, H].

    One projection gives queries, keys and values, which go through a short causal convolution and
    silu, and the output gate z, the write strength beta and the decay alpha of each value head. The
    gated delta rule follows, then the norm of each head, the gate, and the output projection. Split
    over value heads, with the key heads that they read: one that several ranks read lies on all of
    them, as kv heads of attention do. Communicates over the tensor-parallel group, and over the
    context-parallel group, whose ranks hold shares of each document: around convolution and
    recurrence they exchange tokens for heads.

    Global names are `delta_net.{q,k,v,z,beta,alpha,out}.weight`, `delta_net.{q,k,v}_conv.weight`,
    `delta_net.norm.weight` and, fp32 in a model of any dtype, `delta_net.{a_log,dt_bias}`.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        delta = config.delta_net
        assert delta is not None, "a pattern with G has been checked to have it"
        self.config = delta
        self.layer_index = layer_index
        self._group = build.tp
        key = Part("k", delta.num_key_heads, delta.key_head_dim)
        value = Part("v", delta.num_value_heads, delta.value_head_dim)
        self._heads = Part("heads", delta.num_value_heads)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            parts=(
                Part("q", key.units, key.unit_size),
                key,
                value,
                Part("z", value.units, value.unit_size),
                Part("beta", value.units),
                Part("alpha", value.units),
            ),
            group=build.tp,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        parts = {"q_conv": key, "k_conv": key, "v_conv": value}
        self.conv = CausalConv(parts, delta.conv_width, bias=False, build=build)
        # Rounded to 16 bits, the decay of long memories would be another.
        wide = accumulation_dtype(build.dtype)
        heads = self._heads.local_features(build.tp.size)
        self.a_log = nn.Parameter(torch.empty(heads, dtype=wide, device=build.device))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=wide, device=build.device))
        self.norm = GatedHeadNorm(delta.value_head_dim, eps=config.norm_eps, build=build)
        self.out = RowParallelLinear(
            delta.value_size,
            config.hidden_size,
            group=build.tp,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._l2_norm = build.kernels.l2_norm
        self._rule = build.kernels.gated_delta_rule
        self._exchange = build.shared(HeadExchange, lambda: HeadExchange(build.mesh.cp))

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H]; with a cache in `context`, new tokens continue from its states.

        Raises:
            ValueError: the batch is not this rank's share, or there is a cache for shares.
        """
        context.check_shares(self._exchange.group.size)
        rows: Tensor = self.in_proj(hidden)
        key, _, value, _, heads, _ = self.in_proj.local_sizes
        mixed, z, gates = torch.split(rows, [2 * key + value, value, 2 * heads], dim=-1)
        documents = Documents.of(context.batch)
        if self._exchange.group.size == 1:
            y = self._mix(mixed, gates, documents, context)
        else:
            y = self._mix_shares(mixed, gates, documents, context)
        out: Tensor = self.out(self.norm(y, z.view(y.shape)).flatten(1))
        return out

    def _mix_shares(
        self, mixed: Tensor, gates: Tensor, documents: Documents, context: TokenContext
    ) -> Tensor:
        """The same as `_mix` where each rank has a share of every document."""
        exchange, count = self._exchange, mixed.shape[0]
        key, _, value, _, heads, _ = self.in_proj.local_sizes
        size, value_size = self.config.key_head_dim, self.config.value_head_dim
        parts = [
            part.reshape(count, -1, width)
            for part, width in zip(
                (*torch.split(mixed, [key, key, value], -1), *torch.split(gates, heads, -1)),
                (size, size, value_size, 1, 1),
                strict=True,
            )
        ]
        wide, documents = documents.widen(exchange, count)
        *parts, beta, alpha = (part.flatten(1) for part in exchange.to_heads(parts, wide))
        y = self._mix(torch.cat(parts, 1), torch.cat((beta, alpha), 1), documents, context)
        return exchange.to_rows(y, wide)

    def _mix(
        self, mixed: Tensor, gates: Tensor, documents: Documents, context: TokenContext
    ) -> Tensor:
        """Convolution and recurrence of whole documents, for the heads that are here.

        q, k and v in one [T, 2·K·D + h·Dv], beta and alpha in one [T, 2·h], to [T, h, Dv].
        """
        delta, cache = self.config, context.cache
        kept = None if cache is None else cache.recall(self.layer_index)
        inputs, states = (None, None) if kept is None else kept
        mixed, inputs = self.conv(mixed, documents, inputs)
        beta, alpha = gates.to(self.a_log.dtype).chunk(2, dim=-1)
        value = beta.shape[1] * delta.value_head_dim
        key = (mixed.shape[1] - value) // 2
        q, k, v = torch.split(mixed, [key, key, value], dim=-1)
        count, heads = beta.shape
        keys = (count, key // delta.key_head_dim, delta.key_head_dim)
        q, k = (self._l2_norm(x.reshape(keys), _LEAST_LENGTH) for x in (q, k))
        a_log, dt_bias = map(self._exchange.my_heads, (self.a_log, self.dt_bias))
        y, states = self._rule(
            q,
            k,
            v.reshape(count, heads, delta.value_head_dim),
            -a_log.exp() * F.softplus(alpha + dt_bias),
            beta.sigmoid(),
            cu_seqlens=documents.cu_seqlens,
            max_seqlen=documents.max_seqlen,
            uniform=documents.uniform,
            initial_states=states,
            chunk_size=delta.chunk_size,
        )
        if cache is not None:
            cache.keep(self.layer_index, (inputs, states))
        return y

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `a_log` and `dt_bias`, global `<prefix>.<name>` [h]."""
        delta = self.config
        inits = {
            "a_log": Init(
                kind="uniform", low=delta.a_init_min, high=delta.a_init_max, through="exp"
            ),
            "dt_bias": Init(
                kind="log_uniform",
                low=delta.dt_init_min,
                high=delta.dt_init_max,
                through="softplus",
            ),
        }
        return {
            name: fused_spec({join(prefix, name): self._heads}, self._group, init=init, fp32=True)
            for name, init in inits.items()
        }


class GatedHeadNorm(HeadRMSNorm):
    """norm(y) · weight · silu(z) of every head by itself, with weights [Dv] that they share."""

    def forward(self, y: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        """[T, h, Dv] and alike to alike; computed in fp32 and rounded once."""
        wide = accumulation_dtype(y.dtype)
        return (super().forward(y.to(wide)) * F.silu(z.to(wide))).to(y.dtype)

"""The Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060).

T tokens, H hidden, I inner width, G groups, N state size, h heads of P channels, W taps of the
convolution; I, G and h are those of this rank, B documents.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_kernels import accumulation_dtype
from mcore_models.common.builder import BuildContext
from mcore_models.common.causal_conv import CausalConv, Documents
from mcore_models.common.context import TokenContext
from mcore_models.config import ModelConfig
from mcore_models.parts import MambaConfig
from mcore_parallel import Init, ParamSpec, copy_to_group, reduce_from_group
from mcore_parallel.context import HeadExchange
from mcore_parallel.spec import join
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear, fused_spec


class Mamba2(nn.Module):
    """A gated state space within each document: [T, H] to [T, H].

    One projection gives the gate z, the input x, the state's input and output B and C, and the
    step size dt; x, B and C go through a short causal convolution and silu; the scan follows, then
    the gated norm and the output projection. Split over heads, with the groups of B and C that they
    read: a group that several ranks read lies on all of them, as kv heads do, and their norm sums
    over them. Communicates over the tensor-parallel group, and over the context-parallel group,
    whose ranks hold shares of each document: around convolution and scan they exchange tokens for
    heads, so that each has whole documents for some of its heads (and groups, likewise).

    Global names are `mamba.{z,x,b,c,dt,out}.weight`, `mamba.{x,b,c}_conv.{weight,bias}`,
    `mamba.norm.weight` and, fp32 in a model of any dtype, `mamba.{a_log,d,dt_bias}`.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        mamba = config.mamba
        assert mamba is not None, "a pattern with M has been checked to have it"
        self.config = mamba
        self.layer_index = layer_index
        self._group = build.tp
        heads, size = mamba.num_heads, mamba.head_dim
        groups, state = mamba.num_groups, mamba.state_size
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            parts=(
                Part("z", heads, size),
                Part("x", heads, size),
                Part("b", groups, state),
                Part("c", groups, state),
                Part("dt", heads),
            ),
            group=build.tp,
            bias=mamba.projection_bias,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.init_std),
            device=build.device,
            dtype=build.dtype,
        )
        group = Part("group", groups, state)
        convolved = {"x_conv": Part("x", heads, size), "b_conv": group, "c_conv": group}
        self.conv = CausalConv(convolved, mamba.conv_width, bias=mamba.conv_bias, build=build)
        # Rounded to 16 bits, the decay of long memories would be another.
        wide = accumulation_dtype(build.dtype)
        size = heads // build.tp.size
        self.a_log = nn.Parameter(torch.empty(size, dtype=wide, device=build.device))
        self.d = nn.Parameter(torch.empty(size, dtype=wide, device=build.device))
        self.dt_bias = nn.Parameter(torch.empty(size, dtype=wide, device=build.device))
        self.norm = GatedRMSNorm(mamba, eps=config.norm_eps, build=build)
        self.out = RowParallelLinear(
            mamba.inner_size,
            config.hidden_size,
            group=build.tp,
            bias=mamba.projection_bias,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._scan = build.kernels.ssd_scan
        self._exchange = build.shared(HeadExchange, lambda: HeadExchange(build.mesh.cp))

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H]; with a cache in `context`, new tokens continue from its states.

        Raises:
            ValueError: the batch is not this rank's share, or there is a cache for shares.
        """
        context.check_shares(self._exchange.group.size)
        rows: Tensor = self.in_proj(hidden)
        inner, _, grouped, _, heads = self.in_proj.local_sizes
        z, mixed, dt = torch.split(rows, [inner, inner + 2 * grouped, heads], dim=-1)
        documents = Documents.of(context.batch)
        if self._exchange.group.size == 1:
            y = self._mix(mixed, dt, documents, context)
        else:
            y = self._mix_shares(mixed, dt, documents, context)
        out: Tensor = self.out(self.norm(y.flatten(1), z))
        return out

    def _mix_shares(
        self, mixed: Tensor, dt: Tensor, documents: Documents, context: TokenContext
    ) -> Tensor:
        """The same as `_mix` where each rank has a share of every document."""
        exchange, count = self._exchange, mixed.shape[0]
        inner, _, grouped, _, _ = self.in_proj.local_sizes
        x, b, c = torch.split(mixed, [inner, grouped, grouped], dim=-1)
        sizes = (self.config.head_dim, self.config.state_size, self.config.state_size, 1)
        parts = [p.reshape(count, -1, size) for p, size in zip((x, b, c, dt), sizes, strict=True)]
        wide, documents = documents.widen(exchange, count)
        *parts, dt = (part.flatten(1) for part in exchange.to_heads(parts, wide))
        y = self._mix(torch.cat(parts, 1), dt, documents, context)
        return exchange.to_rows(y, wide)

    def _mix(
        self, mixed: Tensor, dt: Tensor, documents: Documents, context: TokenContext
    ) -> Tensor:
        """Convolution and scan of whole documents, for the heads and groups that are here.

        x, B and C in one [T, I + 2·G·N], and dt [T, h], to [T, h, P].
        """
        mamba, cache = self.config, context.cache
        kept = None if cache is None else cache.recall(self.layer_index)
        inputs, states = (None, None) if kept is None else kept
        mixed, inputs = self.conv(mixed, documents, inputs)
        count, heads = dt.shape
        inner = heads * mamba.head_dim
        grouped = (mixed.shape[1] - inner) // 2
        x, b, c = torch.split(mixed, [inner, grouped, grouped], dim=-1)
        state = (count, grouped // mamba.state_size, mamba.state_size)
        a_log, d, dt_bias = map(self._exchange.my_heads, (self.a_log, self.d, self.dt_bias))
        y, states = self._scan(
            x.reshape(count, heads, mamba.head_dim),
            dt,
            a_log,
            b.reshape(state),
            c.reshape(state),
            cu_seqlens=documents.cu_seqlens,
            max_seqlen=documents.max_seqlen,
            uniform=documents.uniform,
            d=d,
            dt_bias=dt_bias,
            dt_limits=mamba.dt_limits,
            initial_states=states,
            chunk_size=mamba.chunk_size,
        )
        if cache is not None:
            cache.keep(self.layer_index, (inputs, states))
        return y

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The specs of `a_log`, `d` and `dt_bias`, global `<prefix>.<name>` [h]."""
        mamba = self.config
        inits = {
            "a_log": Init(
                kind="uniform", low=mamba.a_init_min, high=mamba.a_init_max, through="exp"
            ),
            "d": Init(kind="ones"),
            "dt_bias": Init(
                kind="log_uniform",
                low=mamba.dt_init_min,
                high=mamba.dt_init_max,
                through="softplus",
            ),
        }
        heads = Part("heads", mamba.num_heads)
        return {
            name: fused_spec({join(prefix, name): heads}, self._group, init=init, fp32=True)
            for name, init in inits.items()
        }


class GatedRMSNorm(nn.Module):
    """norm(y · silu(z)) · weight, or norm(y) · weight · silu(z): [T, I] and [T, I] to [T, I].

    The mean of squares is over the I / G channels of a group at a time, so that cutting groups over
    ranks changes nothing. A group that lies on several ranks is summed over these.
    """

    def __init__(self, mamba: MambaConfig, *, eps: float, build: BuildContext) -> None:
        super().__init__()
        tp = build.tp
        self.eps = eps
        self.before_gate = mamba.norm_before_gate
        self.group_size = mamba.inner_size // mamba.num_groups
        self._heads = Part("heads", mamba.num_heads, mamba.head_dim)
        self._groups = max(1, mamba.num_groups // tp.size)
        self._group = tp
        self._shared_by = tp.split(max(1, tp.size // mamba.num_groups))
        size = mamba.inner_size // tp.size
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype, device=build.device))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Norm every row; computed in fp32 and rounded once."""
        wide = accumulation_dtype(y.dtype)
        gate = F.silu(z.to(wide))
        out = y.to(wide) if self.before_gate else y.to(wide) * gate
        grouped = out.view(out.shape[0], self._groups, out.shape[1] // self._groups)
        total = grouped.square().sum(-1, keepdim=True)
        if self._shared_by.size > 1:
            # Each rank goes on with the whole sum, so its gradient is summed as well.
            total = copy_to_group(reduce_from_group(total, self._shared_by), self._shared_by)
        out = (grouped * torch.rsqrt(total / self.group_size + self.eps)).flatten(-2)
        out = out * self.weight.to(wide)
        return (out * gate if self.before_gate else out).to(y.dtype)

    def param_specs(self, prefix: str) -> dict[str, ParamSpec]:
        """The spec of `weight`, global `<prefix>.weight` [I]."""
        named = {join(prefix, "weight"): self._heads}
        return {"weight": fused_spec(named, self._group, init=Init(kind="ones"))}

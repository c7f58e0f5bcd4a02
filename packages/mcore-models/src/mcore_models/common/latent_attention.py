"""Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434).

T tokens, t of them with hidden states here (T / tp under sequence parallelism), H hidden, Q heads
of this rank; Rq and Rkv the ranks of queries and of keys and values; Dn and Dr channels of a head
without and with position, Dv of its values.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcore_kernels import resolve, rope_cos_sin
from mcore_models.common.batch import TokenBatch
from mcore_models.common.builder import BuildContext
from mcore_models.common.context import KVCache, TokenContext
from mcore_models.common.norm import RMSNorm
from mcore_models.common.recompute import recomputed_attention
from mcore_models.common.whole_linear import WholeLinear
from mcore_models.config import ModelConfig
from mcore_parallel import (
    AttentionOp,
    Init,
    copy_to_group,
    gather_sequence,
)
from mcore_parallel.context import context_attention
from mcore_parallel.protocols import AttentionGradOp
from mcore_parallel.recompute import recompute
from mcore_parallel.tensor import ColumnParallelLinear, Part, RowParallelLinear


class LatentAttention(nn.Module):
    """Causal attention within each document over what tokens are pressed into: [T, H] to [T, H].

    Split over heads. What presses (`attention.{q_down,kv_down,k_rope}.weight`, one local weight) is
    whole on every rank of the tensor-parallel group, where each presses the tokens it holds; up
    again (`attention.{q_up,k_up,v_up}.weight`) go the heads of the rank. Communicates over that
    group, and over the context-parallel group as `Attention` does.

    Tokens in a cache are not brought up again: as k = Uk · c and v = Uv · c for a pressed c, a
    query looks at c itself through Ukᵀ, and the sum of c that it finds goes through Uv. These heads
    are wider than most kernels take: where the one that is asked for by name cannot, decoding uses
    the best that runs.
    """

    parallel = True

    def __init__(self, config: ModelConfig, build: BuildContext, layer_index: int) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None, "a pattern with + has been checked to have it"
        self.config = latent
        self.layer_index = layer_index
        self._tp = build.tp
        self._is_cut = build.sequence_parallel
        self._heads = latent.num_heads // build.tp.size
        self._scale = latent.scale(config.rope)
        self._interleaved = config.rope.interleaved
        heads, rank = latent.num_heads, latent.q_rank
        sizes = {"kv_down": latent.kv_rank, "k_rope": latent.rope_dim}
        if rank is not None:
            sizes = {"q_down": rank, **sizes}
            self.q_down_norm = RMSNorm(rank, eps=latent.norm_eps, build=build)
        self.down = WholeLinear(config.hidden_size, parts=sizes, build=build, std=config.init_std)
        self.kv_down_norm = RMSNorm(latent.kv_rank, eps=latent.norm_eps, build=build)
        query = Part("q" if rank is None else "q_up", heads, latent.query_dim)
        self.q = _column(config, build, rank or config.hidden_size, query)
        keys, values = Part("k_up", heads, latent.head_dim), Part("v_up", heads, latent.value_dim)
        self.kv_up = _column(config, build, latent.kv_rank, keys, values)
        self.o = RowParallelLinear(
            heads * latent.value_dim,
            config.hidden_size,
            group=build.tp,
            sequence_parallel=build.sequence_parallel,
            linear=build.kernels.linear,
            init=Init(kind="normal", std=config.output_init_std),
            device=build.device,
            dtype=build.dtype,
        )
        self._rope = build.kernels.rope
        self._over_latents = _attention_over_latents(build, latent.kept_dim)
        self._shares = build.mesh.cp.size
        op = _attention_of_size(build, latent.query_dim)
        self._attention: AttentionOp = op
        if self._shares > 1:
            kind = build.mesh.config.context_kind_of(layer_index)
            self._attention = build.shared(
                ("latent", kind), lambda: context_attention(kind, build.mesh.cp, op)
            )
        self._up_again = build.recompute.recomputes("latent_up")
        if build.recompute.recomputes("core_attn"):
            self._attention = recomputed_attention(self._attention)

    def forward(self, hidden: Tensor, context: TokenContext) -> Tensor:
        """[T, H] to [T, H]; with a cache in `context`, new tokens also see the cached ones.

        Raises:
            ValueError: the batch is not this rank's share, or there is a cache for shares.
        """
        context.check_shares(self._shares)
        named = zip(self.down.parts, self.down.split(self.down(hidden)), strict=True)
        pressed = {part.name: rows for part, rows in named}
        query = self.q_down_norm(pressed["q_down"]) if "q_down" in pressed else hidden
        c: Tensor = self.kv_down_norm(pressed["kv_down"])
        mix = partial(self._from_pressed, context)
        if self._up_again and context.cache is None:
            mix = partial(recompute, mix)
        out: Tensor = self.o(mix(query, c, pressed["k_rope"]).flatten(1))
        return out

    def _from_pressed(
        self, context: TokenContext, query: Tensor, c: Tensor, k_rope: Tensor
    ) -> Tensor:
        """What attention finds [T, Q, Dv], from what tokens are pressed into, [t, …] each."""
        q: Tensor = self.q(query)
        q = q.view(q.shape[0], self._heads, self.config.query_dim)
        # Every rank's heads use it, so that its gradient is summed over the ranks.
        spread = gather_sequence if self._is_cut else copy_to_group
        k_rope = spread(k_rope, self._tp).unsqueeze(1)
        q_plain, q_rope = torch.split(q, [self.config.head_dim, self.config.rope_dim], dim=-1)
        if context.latent_rotary is not None:
            cos_sin = context.latent_rotary
            q_rope, k_rope = self._rope(q_rope, k_rope, *cos_sin, interleaved=self._interleaved)
        rows = _Rows(q_plain, q_rope, c, k_rope)
        if context.cache is not None:
            mixed = self._look_back(rows, context.batch, context.cache)
            if mixed is not None:
                return mixed
        return self._mix(rows, context.batch)

    def _mix(self, rows: "_Rows", batch: TokenBatch) -> Tensor:
        """Attention [T, Q, Dv] of the batch's tokens to each other, their keys and values made."""
        heads = self._heads
        made: Tensor = self.kv_up(rows.c)
        k_plain, v = self.kv_up.split(made)
        k_plain = k_plain.reshape(len(made), heads, self.config.head_dim)
        mixed, _ = self._attention(
            torch.cat([rows.q_plain, rows.q_rope], -1),
            torch.cat([k_plain, rows.k_rope.expand(-1, heads, -1)], -1),
            v.reshape(len(made), heads, self.config.value_dim),
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_k=batch.max_seqlen,
            uniform=batch.uniform,
            causal=True,
            scale=self._scale,
        )
        return mixed

    def _look_back(self, rows: "_Rows", batch: TokenBatch, cache: KVCache) -> Tensor | None:
        """Keep [c | k_rope] of the new tokens; attention [T, Q, Dv] to all that is kept.

        None where nothing was kept before: making keys and values is less work then.
        """
        latent = self.config
        new = torch.cat([rows.c, rows.k_rope.squeeze(1)], -1).unsqueeze(1)
        (kept,), bounds, longest = cache.append(self.layer_index, (new,))
        if kept.shape[0] == new.shape[0]:
            return None
        k_up, v_up = torch.split(self.kv_up.weight, list(self.kv_up.local_sizes))
        k_up = k_up.view(self._heads, latent.head_dim, latent.kv_rank)
        v_up = v_up.view(self._heads, latent.value_dim, latent.kv_rank)
        through = torch.einsum("thd,hdr->thr", rows.q_plain, k_up)
        mixed, _ = self._over_latents(
            torch.cat([through, rows.q_rope], -1),
            kept,
            kept[..., : latent.kv_rank],
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=bounds,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_k=longest,
            causal=True,
            scale=self._scale,
        )
        return torch.einsum("thr,hdr->thd", mixed, v_up)


class _Rows(NamedTuple):
    """Of each token: its queries [T, Q, Dn] and [T, Q, Dr], c [T, Rkv], its key [T, 1, Dr]."""

    q_plain: Tensor
    q_rope: Tensor
    c: Tensor
    k_rope: Tensor


def latent_rotary(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin [T, Dr / 2] for the rotary channels at `positions` [T]; None without any."""
    if config.latent is None or config.position != "rope":
        return None
    scaling, _ = config.rope.scalings()
    size, base = config.latent.rope_dim, config.rope_base
    return rope_cos_sin(positions, size, base=base, scaling=scaling)


def _column(
    config: ModelConfig, build: BuildContext, inputs: int, *parts: Part
) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        inputs,
        parts=parts,
        group=build.tp,
        sequence_parallel=build.sequence_parallel,
        linear=build.kernels.linear,
        init=Init(kind="normal", std=config.init_std),
        device=build.device,
        dtype=build.dtype,
    )


def _attention_of_size(build: BuildContext, size: int) -> AttentionGradOp:
    """The attention of the model's kernels for heads of so many channels."""
    kernels = build.kernels
    if kernels.target.head_dim == size:
        return kernels.attention
    target = replace(kernels.target, head_dim=size)
    return resolve("attention", target=target, require=kernels.config.choice("attention"))


def _attention_over_latents(build: BuildContext, size: int) -> AttentionOp:
    """The same where few kernels take so many channels: else the best that runs."""
    try:
        return _attention_of_size(build, size)
    except ValueError:
        return resolve("attention", target=replace(build.kernels.target, head_dim=size))

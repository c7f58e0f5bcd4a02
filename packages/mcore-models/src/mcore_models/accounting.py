"""Parameters and floating-point operations of an architecture, by formula.

The one source for model-FLOPs utilisation: training, benchmarks and planning all count with this.
The counting itself is that of `mcore_parallel.cost.ModelShape`, which also estimates what a step
takes and holds under a layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_models.config import ModelConfig
from mcore_models.parts import DeltaNetConfig, LatentAttentionConfig, MambaConfig, MoEConfig
from mcore_models.pattern import NO_PART
from mcore_parallel.cost import (
    AttentionShape,
    Counts,
    DeltaNetShape,
    ExpertsShape,
    LayerShape,
    MambaShape,
    MLPShape,
    ModelShape,
    Part,
    count_layer,
)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model by where they are; tied embeddings count once.

    `matmul` are the weights of all matrix products, the head included (also when it is tied);
    `embedding` the token and position tables; `total` every parameter. `active` and
    `active_matmul` leave out the experts that a token does not choose.
    """

    total: int
    embedding: int
    matmul: int
    active: int
    active_matmul: int


def model_shape(config: ModelConfig) -> ModelShape:
    """The shape of the model that `build_model` makes, padding excluded, for planning its training.

    `mcore_parallel.cost` says of it how long a step takes and what a rank holds.

    Raises:
        ValueError: when the pattern has a letter whose part is made by a builder: count the built
            model instead.
    """
    norm = _norm_size(config)
    kinds = [(x, config.attention.window_of(i)) for i, x in enumerate(config.layer_pattern)]
    layers = {kind: _layer(config, *kind, norm) for kind in set(kinds)}
    shapes = tuple(layers[kind] for kind in kinds)
    return ModelShape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=shapes if config.t5 is None else _both_stacks(config, norm),
        tied_embeddings=config.tied_embeddings,
        positions=_table_rows(config),
        vectors=_other_vectors(config, norm),
        has_head=config.bert is None or config.bert.masked_head,
        head_layer=config.bert is not None and config.bert.masked_head,
        predictions=len(config.mtp_pattern),
    )


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact parameter counts of the model that `build_model` makes, padding excluded.

    What predicts further tokens (`mtp`) counts in full, and as used by every token.

    Raises:
        ValueError: when the pattern has a letter whose part is made by a builder: count the built
            model instead.
    """
    shape = model_shape(config)
    further = _further(shape, _norm_size(config))
    idle = further.routed + further.routed_vectors - further.active - further.active_vectors
    matmul = further.dense + further.routed
    return ParameterCount(
        total=shape.parameters + further.total,
        embedding=shape.embedding,
        matmul=shape.matmul_parameters + matmul,
        active=shape.active_parameters + further.total - idle,
        active_matmul=shape.active_matmul_parameters + matmul - further.routed + further.active,
    )


def _further(shape: ModelShape, norm: int) -> Counts:
    """What `shape.parameters` leaves out: of each depth a layer, a projection and three norms."""
    own = Counts(dense=2 * shape.hidden_size**2, vectors=3 * norm)
    layer = count_layer(shape.layers[-1], shape.hidden_size)
    return (layer + own).times(shape.predictions)


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Floating-point operations of one training step per token (forward and backward).

    6 · active matmul parameters (2 forward, 4 backward for each weight) plus attention: a causal
    query sees seq_length / 2 keys on average, one that sees later keys too all of them; scores and
    mixing cost 2 · 2 · head size each, forward and twice that backward: of causal attention
    6 · seq_length · heads · head size per layer. In layers with a window w < seq_length it sees
    w · (1 - w / (2 · seq_length)) keys.
    A Mamba-2 layer costs the same for every token of any document: forward, for each number of its
    states, 3 to update it (decay, product, sum) and 2 to read it, and 2 for each tap and channel of
    its convolution; twice that backward. A gated delta net likewise, with 1 to decay a number of
    its states, 2 to read what it says of a key, 2 to correct that and 2 to read it. How a scan in
    chunks computes the same is not counted.
    Of an encoder-decoder (`t5`) it is what one token of either text costs together, for texts of
    `seq_length` both.
    Recomputation, norms, activations and the embedding lookup are not counted.
    """
    return model_shape(config).flops_per_token(seq_length)


def flops_of_documents(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations of a training step over packed documents of these lengths."""
    return model_shape(config).flops_of_documents(lengths)


def flops_utilization(
    config: ModelConfig, *, seq_length: int, tokens_per_second: float, peak_flops: float
) -> float:
    """Model-FLOPs utilisation (Chowdhery et al., "PaLM", 2022), a fraction of `peak_flops`.

    `tokens_per_second` per device and `peak_flops` per second of one device.
    """
    return flops_per_token(config, seq_length) * tokens_per_second / peak_flops


def _table_rows(config: ModelConfig) -> int:
    """Rows of the tables of positions and segments."""
    positions = config.max_positions if config.position == "learned" else 0
    return positions + (config.bert.num_token_types if config.bert is not None else 0)


def _other_vectors(config: ModelConfig, norm: int) -> int:
    """Parameters outside the layers that are in no product of every token, `norm` of each norm."""
    final = 0 if config.norm_place == "sum" else norm
    bert, hidden = config.bert, config.hidden_size
    if config.t5 is not None:
        return 2 * (final + config.t5.num_buckets * config.num_heads)
    if bert is None:
        return final
    heads = (norm + hidden + config.vocab_size) * bert.masked_head
    # These are products of one token of each document.
    heads += (hidden + 1) * (hidden * bert.pooler + 2 * bert.pair_head)
    return final + norm + heads


def _both_stacks(config: ModelConfig, norm: int) -> tuple[LayerShape, ...]:
    """The layers of an encoder and of the decoder that reads it."""
    assert config.t5 is not None
    inside, mlp = _attention(config, None), _mlp(config, config.mlp_size)
    across = replace(inside, causal=False)
    encoder = LayerShape(parts=(across, mlp), vectors=2 * norm)
    decoder = LayerShape(parts=(inside, across, mlp), vectors=3 * norm)
    count = config.t5.num_decoder_layers or config.num_layers
    return (encoder,) * config.num_layers + (decoder,) * count


def _norm_size(config: ModelConfig) -> int:
    return config.hidden_size * (2 if _has_norm_bias(config) else 1)


def _has_norm_bias(config: ModelConfig) -> bool:
    return config.norm == "layer_norm" and config.norm_bias


def _layer(config: ModelConfig, letters: str, window: int | None, norm: int) -> LayerShape:
    parts = tuple(_part(config, letter, window) for letter in letters.replace(NO_PART, ""))
    norms = len(parts) * (2 if config.norm_place == "both" else 1)
    if config.residual == "parallel_shared" and config.norm_place != "post":
        norms -= len(parts) - 1
    return LayerShape(parts=parts, vectors=norm * norms)


def _part(config: ModelConfig, letter: str, window: int | None) -> Part:
    if letter == "*":
        return _attention(config, window)
    if letter == "-":
        return _mlp(config, config.mlp_size)
    if letter == "E" and config.moe is not None:
        return _experts(config, config.moe)
    if letter == "M" and config.mamba is not None:
        return _mamba(config.hidden_size, config.mamba)
    if letter == "G" and config.delta_net is not None:
        return _delta_net(config.delta_net)
    if letter == "+" and config.latent is not None:
        return _latent_attention(config.latent)
    raise ValueError(
        f"the pattern letter {letter!r} is made by a builder, so its parameters are not known: "
        f"build the model on device 'meta' and count there; counted here are '*', '+', 'M', 'G', "
        f"'-' and 'E'"
    )


def _attention(config: ModelConfig, window: int | None) -> AttentionShape:
    options, size = config.attention, config.head_size
    rows = (config.num_heads * (2 if options.gate else 1) + 2 * config.kv_heads) * size
    vectors = rows * config.qkv_bias + config.hidden_size * config.output_bias
    vectors += config.num_heads * options.sinks
    if options.qk_norm == "head":
        vectors += 2 * size * (2 if _has_norm_bias(config) else 1)
    elif options.qk_norm == "all":
        vectors += (config.num_heads + config.kv_heads) * size
    return AttentionShape(
        num_heads=config.num_heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        gate=options.gate,
        window=window,
        causal=options.causal,
        vectors=vectors,
    )


def _latent_attention(latent: LatentAttentionConfig) -> AttentionShape:
    return AttentionShape(
        num_heads=latent.num_heads,
        kv_heads=latent.num_heads,
        head_size=latent.query_dim,
        value_size=latent.value_dim,
        q_rank=latent.q_rank or 0,
        kv_rank=latent.kv_rank,
        rope_size=latent.rope_dim,
        vectors=(latent.q_rank or 0) + latent.kv_rank,
    )


def _mlp(config: ModelConfig, width: int) -> MLPShape:
    biases = width * (2 if config.gated else 1) + config.hidden_size
    return MLPShape(width=width, gated=config.gated, vectors=biases * config.ffn_bias)


def _expert(config: ModelConfig, moe: MoEConfig) -> MLPShape:
    width, hidden = moe.expert_ffn_size, moe.latent_size or config.hidden_size
    biases = width * (2 if config.gated else 1) + hidden
    return MLPShape(width=width, gated=config.gated, vectors=biases * config.expert_bias)


def _experts(config: ModelConfig, moe: MoEConfig) -> ExpertsShape:
    """Router, experts, and what is beside and around them; corrections are no parameters."""
    return ExpertsShape(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        expert=_expert(config, moe),
        shared=_mlp(config, moe.shared_ffn_size) if moe.shared_ffn_size else None,
        shared_gate=moe.shared_gate,
        latent=moe.latent_size or 0,
        vectors=moe.num_experts * moe.router_bias,
    )


def _delta_net(delta: DeltaNetConfig) -> DeltaNetShape:
    channels = 2 * delta.key_size + delta.value_size
    # taps; a_log and dt_bias of each head; the norm's weights
    other = channels * delta.conv_width + 2 * delta.num_value_heads + delta.value_head_dim
    return DeltaNetShape(
        num_heads=delta.num_value_heads,
        key_heads=delta.num_key_heads,
        key_size=delta.key_head_dim,
        head_size=delta.value_head_dim,
        conv_width=delta.conv_width,
        vectors=other,
    )


def _mamba(hidden: int, mamba: MambaConfig) -> MambaShape:
    inner, channels = mamba.inner_size, mamba.inner_size + 2 * mamba.num_groups * mamba.state_size
    rows = inner + channels + mamba.num_heads  # z, then x, B and C, then dt
    biases = channels * mamba.conv_bias + (rows + hidden) * mamba.projection_bias
    # a_log, d and dt_bias of each head; the norm's weights
    other = channels * mamba.conv_width + 3 * mamba.num_heads + inner
    return MambaShape(
        num_heads=mamba.num_heads,
        head_size=mamba.head_dim,
        state_size=mamba.state_size,
        num_groups=mamba.num_groups,
        conv_width=mamba.conv_width,
        vectors=other + biases,
    )

"""Parameters and floating-point operations of an architecture, by formula.

The one source for model-FLOPs utilisation: training, benchmarks and planning all count with this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_models.config import NO_PART, ModelConfig
from mcore_models.part_configs import MambaConfig, MoEConfig


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


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact parameter counts of the model that `build_model` makes, padding excluded.

    Raises:
        ValueError: when the pattern has a letter whose part is made by a builder: count the built
            model instead.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    norm = hidden * (2 if config.norm == "layer_norm" else 1)
    matmul, other, idle, idle_biases = 0, norm, 0, 0
    for letters in config.layer_pattern:
        for letter in letters.replace(NO_PART, ""):
            weights, biases = _part_parameters(config, letter)
            matmul += weights
            other += norm + biases
            weights, biases = _idle_parameters(config, letter)
            idle += weights
            idle_biases += biases
    tables = vocab * hidden
    if config.position == "learned":
        tables += config.max_positions * hidden
    head = vocab * hidden
    total = matmul + other + tables + (0 if config.tied_embeddings else head)
    return ParameterCount(
        total=total,
        embedding=tables,
        matmul=matmul + head,
        active=total - idle - idle_biases,
        active_matmul=matmul + head - idle,
    )


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Floating-point operations of one training step per token (forward and backward).

    6 · active matmul parameters (2 forward, 4 backward for each weight) plus causal attention once:
    a query sees seq_length / 2 keys on average, and scores and mixing cost 2 · 2 · head size each,
    forward and twice that backward: 6 · seq_length · heads · head size per attention layer.
    A Mamba-2 layer costs the same for every token of any document: forward, for each number of its
    states, 3 to update it (decay, product, sum) and 2 to read it, and 2 for each tap and channel of
    its convolution; twice that backward. How a scan in chunks computes the same is not counted.
    Recomputation, norms, activations and the embedding lookup are not counted.
    """
    return _flops_of_any_token(config) + seq_length * _attention_flops(config)


def flops_of_documents(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Floating-point operations of a training step over packed documents of these lengths."""
    tokens, pairs = sum(lengths), sum(length * length for length in lengths)
    return _flops_of_any_token(config) * tokens + pairs * _attention_flops(config)


def flops_utilization(
    config: ModelConfig, *, seq_length: int, tokens_per_second: float, peak_flops: float
) -> float:
    """Model-FLOPs utilisation (Chowdhery et al., "PaLM", 2022), a fraction of `peak_flops`.

    `tokens_per_second` per device and `peak_flops` per second of one device.
    """
    return flops_per_token(config, seq_length) * tokens_per_second / peak_flops


def _flops_of_any_token(config: ModelConfig) -> float:
    """What a token costs whatever its document."""
    products = 6.0 * count_parameters(config).active_matmul
    if config.mamba is None:
        return products
    mamba, layers = config.mamba, sum("M" in letters for letters in config.layer_pattern)
    states = 5 * mamba.inner_size * mamba.state_size
    taps = 2 * mamba.conv_width * _conv_channels(mamba)
    return products + 3.0 * layers * (states + taps)


def _attention_flops(config: ModelConfig) -> float:
    layers = sum("*" in letters for letters in config.layer_pattern)
    return 6.0 * layers * config.num_heads * config.head_size


def _part_parameters(config: ModelConfig, letter: str) -> tuple[int, int]:
    """Weights of matrix products, and everything else, of one part."""
    hidden = config.hidden_size
    if letter == "*":
        inner = config.num_heads * config.head_size
        qkv = inner + 2 * config.kv_heads * config.head_size
        biases = qkv * config.qkv_bias + hidden * config.linear_bias
        return hidden * (qkv + inner), biases
    if letter == "-":
        return _mlp_parameters(config, config.mlp_size)
    if letter == "E" and config.moe is not None:
        return _moe_parameters(config, config.moe)
    if letter == "M" and config.mamba is not None:
        return _mamba_parameters(hidden, config.mamba)
    raise ValueError(
        f"the pattern letter {letter!r} is made by a builder, so its parameters are not known: "
        f"build the model on device 'meta' and count there; counted here are '*', 'M', '-' and 'E'"
    )


def _idle_parameters(config: ModelConfig, letter: str) -> tuple[int, int]:
    """What `_part_parameters` counts, of experts that a token does not use."""
    if letter != "E" or config.moe is None:
        return 0, 0
    idle = config.moe.num_experts - config.moe.top_k
    weights, biases = _expert_parameters(config, config.moe)
    return idle * weights, idle * biases


def _moe_parameters(config: ModelConfig, moe: MoEConfig) -> tuple[int, int]:
    """Of router, experts, and what is beside and around them; corrections are no parameters."""
    hidden = config.hidden_size
    weights, biases = _expert_parameters(config, moe)
    weights = moe.num_experts * (weights + hidden)
    biases = moe.num_experts * (biases + moe.router_bias)
    if moe.shared_ffn_size:
        shared, shared_biases = _mlp_parameters(config, moe.shared_ffn_size)
        weights += shared + hidden * moe.shared_gate
        biases += shared_biases
    return weights + 2 * hidden * (moe.latent_size or 0), biases


def _expert_parameters(config: ModelConfig, moe: MoEConfig) -> tuple[int, int]:
    return _mlp_parameters(config, moe.expert_ffn_size, moe.latent_size)


def _mamba_parameters(hidden: int, mamba: MambaConfig) -> tuple[int, int]:
    inner, channels = mamba.inner_size, _conv_channels(mamba)
    rows = inner + channels + mamba.num_heads  # z, then x, B and C, then dt
    biases = channels * mamba.conv_bias + (rows + hidden) * mamba.projection_bias
    # a_log, d and dt_bias of each head; the norm's weights
    other = channels * mamba.conv_width + 3 * mamba.num_heads + inner
    return hidden * (rows + inner), other + biases


def _conv_channels(mamba: MambaConfig) -> int:
    return mamba.inner_size + 2 * mamba.num_groups * mamba.state_size


def _mlp_parameters(config: ModelConfig, width: int, hidden: int | None = None) -> tuple[int, int]:
    hidden = hidden or config.hidden_size
    wide = width * (2 if config.activation == "swiglu" else 1)
    return hidden * (wide + width), (wide + hidden) * config.linear_bias

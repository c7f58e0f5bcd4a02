"""DeepSeek-V3 and what has its class, such as Kimi K2: latent attention and experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.blocks import Blocks, DecodeBlocks
from mcore_models.hf.experts import SharedExperts
from mcore_models.hf.further import (
    FurtherArchitecture,
    further_operators,
    further_repeats,
)
from mcore_models.hf.llama import TIED
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Choice, Field, Only, Ours, give, put
from mcore_parallel.mapping import Drop, Inward, Operator, Rename, Reshape, Split, Stack

_DENSE = "first_k_dense_replace"


@dataclass(frozen=True)
class _Layers:
    """Latent attention in every layer, an MLP in the first ones and experts in the others."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `pattern`."""
        layers, dense = fields["num_layers"], config.get(_DENSE, 3)
        dense = 3 if dense is None else dense
        if type(dense) is not int or dense < 0:
            raise ValueError(f"{_DENSE}={dense!r} must be a whole number of at least 0")
        if dense >= layers:
            raise ValueError(
                f"{_DENSE}={dense} leaves none of num_hidden_layers={layers} layers for experts, "
                f"which is not supported: at most {layers - 1}"
            )
        fields["pattern"] = ("+-",) * dense + ("+E",) * (layers - dense)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the number of layers before the first one with experts."""
        sparse = model.layers_with("E")
        put(config, _DENSE, sparse[0] if sparse else model.num_layers)


@dataclass(frozen=True)
class _KeyHeads:
    """As many heads for keys and values as for queries, always."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Nothing: it follows from the heads of queries."""

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set it, since transformers has a number of its own where it is absent."""
        if model.latent is not None:
            put(config, "num_key_value_heads", model.latent.num_heads)


@dataclass(frozen=True)
class _QueryRank:
    """The rank of queries: null is without, absent is that of DeepSeek-V3."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `latent.q_rank`."""
        value = config.get("q_lora_rank", 1536)
        if value is not None and type(value) is not int:
            raise ValueError(f"q_lora_rank={value!r} must be of type int")
        give(fields, "latent.q_rank", value)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set it, also where there is none."""
        if model.latent is not None:
            put(config, "q_lora_rank", model.latent.q_rank)


def _layer(model: ModelConfig, theirs: str, ours: str) -> Iterator[Operator]:
    """Yield the operators for a layer, which has either an MLP or experts."""
    latent = model.latent
    assert latent is not None
    attention, mine = f"{theirs}.self_attn", f"{ours}.attention"
    yield Drop(f"{attention}.rotary_emb.inv_freq")  # follows from the config
    yield Rename(f"{theirs}.input_layernorm.weight", f"{ours}.input_norm.weight")
    yield Rename(f"{theirs}.post_attention_layernorm.weight", f"{ours}.post_norm.weight")
    yield Rename(f"{attention}.{{part:q|o}}_proj.weight", f"{mine}.{{part}}.weight")
    yield Rename(f"{attention}.q_a_proj.weight", f"{mine}.q_down.weight")
    yield Rename(f"{attention}.q_a_layernorm.weight", f"{mine}.q_down_norm.weight")
    yield Rename(f"{attention}.q_b_proj.weight", f"{mine}.q_up.weight")
    yield Split(
        f"{attention}.kv_a_proj_with_mqa.weight",
        (f"{mine}.kv_down.weight", f"{mine}.k_rope.weight"),
        (latent.kv_rank, latent.rope_dim),
    )
    yield Rename(f"{attention}.kv_a_layernorm.weight", f"{mine}.kv_down_norm.weight")
    # For each head there the rows of its keys, then those of its values.
    fused, rank = f"{attention}.kv_b_proj.weight", latent.kv_rank
    sizes = {f"{mine}.k_up.weight": latent.head_dim, f"{mine}.v_up.weight": latent.value_dim}
    heads, width = latent.num_heads, sum(sizes.values())
    yield Reshape(fused, (heads * width, rank), (heads, width, rank))
    yield Split(fused, tuple(sizes), tuple(sizes.values()), dim=1)
    for name, size in sizes.items():
        yield Reshape(name, (heads, size, rank), (heads * size, rank))
    part = "{part:gate|up|down}"
    yield Rename(f"{theirs}.mlp.{part}_proj.weight", f"{ours}.mlp.{{part}}.weight")
    yield Stack(
        f"{theirs}.mlp.experts.{{expert}}.{part}_proj.weight",
        f"{ours}.moe.experts.{{part}}.weight",
    )
    yield Rename(
        f"{theirs}.mlp.shared_experts.{part}_proj.weight", f"{ours}.moe.shared.{{part}}.weight"
    )
    yield Rename(f"{theirs}.mlp.gate.weight", f"{ours}.moe.router.weight")
    yield Rename(f"{theirs}.mlp.gate.e_score_correction_bias", f"{ours}.moe.router.correction")


def _operators(model: ModelConfig) -> Iterator[Operator]:
    layer = partial(_layer, model)
    yield Inward((DecodeBlocks(), *further_repeats(model)))
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats="model.embed_tokens.weight")
    yield Rename("model.embed_tokens.weight", "embedding.weight")
    yield Rename("model.norm.weight", "final_norm.weight")
    yield from further_operators(model, layer)
    yield from layer("model.layers.{layer}", "layers.{layer}")


DEEPSEEK_V3 = FurtherArchitecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    rules=(
        Field("vocab_size", "vocab_size", int, default=129280),
        Field("hidden_size", "hidden_size", int, default=7168),
        Field("num_hidden_layers", "num_layers", int, default=61),
        Field("intermediate_size", "ffn_size", int, default=18432),
        Field("max_position_embeddings", "max_positions", int, default=4096),
        Field("initializer_range", "init_std", float, default=0.02),
        Field("rms_norm_eps", "norm_eps", float, default=1e-6),
        TIED,
        Only("hidden_act", "silu", absent="silu"),
        Only("attention_bias", False, absent=False),
        Ours("norm", "rms_norm"),
        Ours("activation", "swiglu"),
        Field("num_attention_heads", "latent.num_heads", int, default=128),
        Field("kv_lora_rank", "latent.kv_rank", int, default=512),
        _QueryRank(),
        Field("qk_nope_head_dim", "latent.head_dim", int, default=128),
        Field("qk_rope_head_dim", "latent.rope_dim", int, default=64),
        Field("v_head_dim", "latent.value_dim", int, default=128),
        Ours("latent.norm_eps", 1e-6),
        _KeyHeads(),
        Choice("rope_interleave", "rope.interleaved", ((True, True), (None, True), (False, False))),
        Rope(),
        Field("n_routed_experts", "moe.num_experts", int, default=256),
        Field("num_experts_per_tok", "moe.top_k", int, default=8),
        Field("moe_intermediate_size", "moe.expert_ffn_size", int, default=2048),
        SharedExperts(),
        Field("routed_scaling_factor", "moe.scaling_factor", float, default=2.5),
        Field("n_group", "moe.num_groups", int, default=8),
        Field("topk_group", "moe.top_groups", int, default=4),
        Field("norm_topk_prob", "moe.normalise_top_k", bool, default=True),
        Only("scoring_func", "sigmoid", absent="sigmoid"),
        Only("topk_method", "noaux_tc", absent="noaux_tc"),
        Only("moe_layer_freq", 1, absent=1),
        Ours("moe.score_function", "sigmoid"),
        Ours("moe.group_score_experts", 2),
        Ours("moe.correction_rate", 0.0),
        Ours("moe.aux_loss_coefficient", 1e-4),
        _Layers(),
        Blocks(),
    ),
    operators=_operators,
    unwritten=("quantization_config",),
    other_types=("kimi_k2",),
)
"""`DeepseekV3ForCausalLM` (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437)."""

DEEPSEEK_V3_FURTHER = replace(DEEPSEEK_V3, further=True)
"""The same with the layers that predict further tokens, where folders have them."""

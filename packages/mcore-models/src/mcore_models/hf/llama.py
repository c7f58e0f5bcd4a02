"""LLaMA and what has its shape: Llama 2 and 3, SmolLM2, TinyLlama and others of their class."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.rules import AllBiases, Field, Only, Ours, Rope
from mcore_parallel.mapping import Drop, Operator, Rename

SIZES = (
    Field("vocab_size", "vocab_size", int),
    Field("hidden_size", "hidden_size", int),
    Field("intermediate_size", "ffn_size", int),
    Field("num_hidden_layers", "num_layers", int),
    Field("num_attention_heads", "num_heads", int),
    Field("num_key_value_heads", "num_kv_heads", int, default=None),
    Field("head_dim", "head_dim", int, default=None),
    Field("max_position_embeddings", "max_positions", int, default=2048),
    Field("initializer_range", "init_std", float, default=0.02),
)
"""Rules for the sizes of a decoder, which most architectures call alike."""

DRESS = (
    Field("rms_norm_eps", "norm_eps", float, default=1e-6),
    Only("hidden_act", "silu", absent="silu"),
    Only("attention_dropout", 0.0, absent=0.0),
    Only("quantization_config", None),
    Ours("norm", "rms_norm"),
    Ours("activation", "swiglu"),
)
"""Rules for RMSNorm and SwiGLU."""


def decoder_operators(model: ModelConfig) -> Iterator[Operator]:
    """Yield the operators for the tensors that LLaMA and its kin call alike."""
    yield Rename("model.embed_tokens.weight", "embedding.weight")
    yield Rename("model.norm.weight", "final_norm.weight")
    yield Rename("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.input_norm.weight")
    yield Rename(
        "model.layers.{layer}.post_attention_layernorm.weight", "layers.{layer}.post_norm.weight"
    )
    yield Rename(
        "model.layers.{layer}.self_attn.{part:q|k|v|o}_proj.{kind:weight|bias}",
        "layers.{layer}.attention.{part}.{kind}",
    )
    yield Rename(
        "model.layers.{layer}.mlp.{part:gate|up|down}_proj.{kind:weight|bias}",
        "layers.{layer}.mlp.{part}.{kind}",
    )


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq")  # follows from the config
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats="model.embed_tokens.weight")
    yield from decoder_operators(model)


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    rules=(
        *SIZES,
        *DRESS,
        Field("tie_word_embeddings", "tied_embeddings", bool, default=False),
        AllBiases(),
        Rope(),
    ),
    operators=_operators,
)
"""`LlamaForCausalLM` (Touvron et al., 2023)."""

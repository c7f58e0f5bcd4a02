"""LLaMA and what has its shape: Llama 2 and 3, SmolLM2, TinyLlama and others of their class."""

from collections.abc import Iterator, Mapping

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Field, Only, Ours
from mcore_parallel.mapping import Drop, Operator, Rename

STACK = (
    Field("vocab_size", "vocab_size", int),
    Field("hidden_size", "hidden_size", int),
    Field("num_hidden_layers", "num_layers", int),
    Field("num_attention_heads", "num_heads", int),
    Field("num_key_value_heads", "num_kv_heads", int, default=None),
    Field("head_dim", "head_dim", int, default=None),
    Field("max_position_embeddings", "max_positions", int, default=2048),
    Field("initializer_range", "init_std", float, default=0.02),
)
"""Rules for the sizes of a decoder, which most architectures call alike, but for the MLP's."""

SIZES = (*STACK, Field("intermediate_size", "ffn_size", int))
"""Rules for all sizes of a decoder with an MLP in its layers."""

PLAIN = Only("quantization_config", None)
"""No weight is quantised."""

NORMED = (
    Field("rms_norm_eps", "norm_eps", float, default=1e-6),
    PLAIN,
    Ours("norm", "rms_norm"),
)
"""Rules for RMSNorm."""

DRESS = (*NORMED, Only("hidden_act", "silu", absent="silu"), Ours("activation", "swiglu"))
"""Rules for RMSNorm and SwiGLU."""

TIED = Field("tie_word_embeddings", "tied_embeddings", bool, default=False)
"""Whether the head is the embedding; in some architectures it is unless the field says no."""

NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
"""Norms of a layer there and here."""


def decoder_operators(model: ModelConfig, norms: Mapping[str, str] = NORMS) -> Iterator[Operator]:
    """Yield the operators for the tensors that LLaMA and its kin call alike.

    norms: those of a layer, where they are others or called otherwise.
    """
    yield Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq")  # follows from the config
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats="model.embed_tokens.weight")
    yield Rename("model.embed_tokens.weight", "embedding.weight")
    yield Rename("model.norm.{kind:weight|bias}", "final_norm.{kind}")
    yield from layer_operators("model.layers.{layer}", "layers.{layer}", norms)


def layer_operators(theirs: str, ours: str, norms: Mapping[str, str] = NORMS) -> Iterator[Operator]:
    """Yield those of them that a layer has, whose tensors are called `theirs….` and `ours….`."""
    for there, here in norms.items():
        yield Rename(f"{theirs}.{there}.{{kind:weight|bias}}", f"{ours}.{here}.{{kind}}")
    yield Rename(
        f"{theirs}.self_attn.{{part:q|k|v|o}}_proj.{{kind:weight|bias}}",
        f"{ours}.attention.{{part}}.{{kind}}",
    )
    yield Rename(
        f"{theirs}.self_attn.{{part:q|k}}_norm.weight", f"{ours}.attention.{{part}}_norm.weight"
    )
    yield Rename(
        f"{theirs}.mlp.{{part:gate|up|down}}_proj.{{kind:weight|bias}}",
        f"{ours}.mlp.{{part}}.{{kind}}",
    )


LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    rules=(*SIZES, *DRESS, TIED, Biases(mlp="mlp_bias"), Rope()),
    operators=decoder_operators,
)
"""`LlamaForCausalLM` (Touvron et al., 2023; Llama 3 Team, 2024)."""

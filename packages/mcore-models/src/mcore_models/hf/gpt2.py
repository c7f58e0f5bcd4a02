"""GPT-2: learned positions, and matrices stored [in, out] with q, k and v fused."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import PLAIN
from mcore_models.hf.rules import Choice, Field, Only, Ours
from mcore_parallel.mapping import Drop, Inward, Operator, Rename, Split, Transpose

GELUS = (
    ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu_fast", "gelu_tanh"),
    ("gelu", "gelu"),
)
"""Names of the forms of GELU there and here."""

_LAYER = "transformer.h.{layer}"
_PARTS = {
    "ln_1": "input_norm",
    "ln_2": "post_norm",
    "attn.c_proj": "attention.o",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
_LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield Inward(tuple(_without_prefix()))
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats="transformer.wte.weight")
    yield Rename("transformer.wte.weight", "embedding.weight")
    yield Rename("transformer.wpe.weight", "position_embedding.weight")
    yield Rename("transformer.ln_f.{kind}", "final_norm.{kind}")
    for linear in _LINEARS:
        yield Transpose(f"{_LAYER}.{linear}.weight")
    yield Split(
        f"{_LAYER}.attn.c_attn.{{kind:weight|bias}}",
        tuple(f"layers.{{layer}}.attention.{part}.{{kind}}" for part in "qkv"),
    )
    for theirs, ours in _PARTS.items():
        yield Rename(f"{_LAYER}.{theirs}.{{kind:weight|bias}}", f"layers.{{layer}}.{ours}.{{kind}}")


def _without_prefix() -> Iterator[Operator]:
    """Yield what the first folders need, which hold the inner model, masks included."""
    yield Drop("h.{layer}.attn.{mask:bias|masked_bias}")
    yield Drop(f"{_LAYER}.attn.{{mask:bias|masked_bias}}")
    for name in ("wte", "wpe"):
        yield Rename(f"{name}.weight", f"transformer.{name}.weight")
    yield Rename("ln_f.{kind}", "transformer.ln_f.{kind}")
    for part in ("ln_1", "ln_2", *_LINEARS):
        yield Rename(f"h.{{layer}}.{part}.{{kind}}", f"{_LAYER}.{part}.{{kind}}")


GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    rules=(
        Field("vocab_size", "vocab_size", int),
        Field("n_embd", "hidden_size", int),
        Field("n_layer", "num_layers", int),
        Field("n_head", "num_heads", int),
        Field("n_inner", "ffn_size", int, default=None),
        Field("n_positions", "max_positions", int, default=1024),
        Field("layer_norm_epsilon", "norm_eps", float, default=1e-5),
        Field("initializer_range", "init_std", float, default=0.02),
        Field("tie_word_embeddings", "tied_embeddings", bool, default=True),
        Choice("activation_function", "activation", GELUS),
        Only("scale_attn_weights", True, absent=True),
        Only("scale_attn_by_inverse_layer_idx", False, absent=False),
        Only("add_cross_attention", False, absent=False),
        PLAIN,
        Ours("norm", "layer_norm"),
        Ours("position", "learned"),
        Ours("linear_bias", True),
    ),
    operators=_operators,
)
"""`GPT2LMHeadModel` (Radford et al., 2019)."""

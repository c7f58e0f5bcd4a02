"""GPT-NeoX and Pythia: q, k and v of each head fused, mixer and MLP side by side."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.gpt2 import GELUS
from mcore_models.hf.llama import PLAIN, TIED
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Choice, Field, Ours
from mcore_parallel.mapping import Drop, Operator, Rename, Reshape, Split

_LAYER = "gpt_neox.layers.{layer}"
_PARTS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "attention.dense": "attention.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_ACTIVATIONS = (("gelu", "gelu"), *(pair for pair in GELUS if pair[0] != "gelu"))


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield Drop(f"{_LAYER}.attention.{{mask:bias|masked_bias}}")
    yield Drop(f"{_LAYER}.attention.rotary_emb.inv_freq")
    if model.tied_embeddings:
        yield Drop("embed_out.weight", repeats="gpt_neox.embed_in.weight")
    yield Rename("gpt_neox.embed_in.weight", "embedding.weight")
    yield Rename("gpt_neox.final_layer_norm.{kind}", "final_norm.{kind}")
    yield Rename("embed_out.weight", "lm_head.weight")
    for kind, row in (("weight", (model.hidden_size,)), ("bias", ())):
        yield from _heads_apart(model, kind, row)
    for theirs, ours in _PARTS.items():
        yield Rename(f"{_LAYER}.{theirs}.{{kind:weight|bias}}", f"layers.{{layer}}.{ours}.{{kind}}")


def _heads_apart(model: ModelConfig, kind: str, row: tuple[int, ...]) -> Iterator[Operator]:
    """Yield what makes q, k and v of the rows of head 0, of head 1 and so on."""
    heads, size = model.num_heads, model.head_size
    fused = f"{_LAYER}.attention.query_key_value.{kind}"
    yield Reshape(fused, (3 * heads * size, *row), (heads, 3 * size, *row))
    parts = tuple(f"layers.{{layer}}.attention.{part}.{kind}" for part in "qkv")
    yield Split(fused, parts, dim=1)
    for part in parts:
        yield Reshape(part, (heads, size, *row), (heads * size, *row))


GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    rules=(
        Field("vocab_size", "vocab_size", int),
        Field("hidden_size", "hidden_size", int),
        Field("intermediate_size", "ffn_size", int),
        Field("num_hidden_layers", "num_layers", int),
        Field("num_attention_heads", "num_heads", int),
        Field("max_position_embeddings", "max_positions", int, default=2048),
        Field("initializer_range", "init_std", float, default=0.02),
        Field("layer_norm_eps", "norm_eps", float, default=1e-5),
        TIED,
        Choice("hidden_act", "activation", _ACTIVATIONS),
        Choice("use_parallel_residual", "residual", ((True, "parallel"), (False, "sequential"))),
        PLAIN,
        Ours("norm", "layer_norm"),
        Biases(default=True),
        Ours("mlp_bias", True),
        Rope(base="rotary_emb_base", share="rotary_pct", default_share=0.25),
    ),
    operators=_operators,
)
"""`GPTNeoXForCausalLM` (Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023)."""

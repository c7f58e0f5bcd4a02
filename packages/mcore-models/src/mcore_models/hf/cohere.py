"""Command R: mixer and MLP side by side behind one norm, and scaled logits."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import PLAIN, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Field, Only, Ours, with_defaults
from mcore_parallel.mapping import Operator


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model, {"input_layernorm": "input_norm"})


COHERE = Architecture(
    name="CohereForCausalLM",
    model_type="cohere",
    rules=(
        *with_defaults(SIZES, max_position_embeddings=8192),
        Field("layer_norm_eps", "norm_eps", float, default=1e-5),
        Field("logit_scale", "logit_scale", float, default=0.0625),
        *with_defaults((TIED,), tie_word_embeddings=True),
        Biases(),
        Only("hidden_act", "silu", absent="silu"),
        Only("use_qk_norm", False, absent=False),
        PLAIN,
        Ours("norm", "layer_norm"),
        Ours("norm_bias", False),
        Ours("activation", "swiglu"),
        Ours("residual", "parallel_shared"),
        Ours("rope.interleaved", True),
        Rope(5e5),
    ),
    operators=_operators,
)
"""`CohereForCausalLM`, Command R without norms of heads (Cohere, 2024)."""

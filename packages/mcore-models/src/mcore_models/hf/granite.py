"""Granite: LLaMA with a multiplier for embeddings, scores, steps and logits."""

from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Field, Power

GRANITE = Architecture(
    name="GraniteForCausalLM",
    model_type="granite",
    rules=(
        *SIZES,
        *DRESS,
        TIED,
        Biases(mlp="mlp_bias"),
        Field("embedding_multiplier", "embedding_scale", float, default=1.0),
        Field("residual_multiplier", "residual_scale", float, default=1.0),
        Power("attention_multiplier", "attention.scale", 1.0, power=1),
        Power("logits_scaling", "logit_scale", 1.0, power=-1),
        Rope(),
    ),
    operators=decoder_operators,
)
"""`GraniteForCausalLM` (IBM, "Granite 3.0 Language Models", 2024)."""

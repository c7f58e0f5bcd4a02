"""Phi-3 and Phi-4-mini: fused projections, and positions scaled by lists of factors."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import with_defaults
from mcore_models.hf.windows import Windows
from mcore_parallel.mapping import Operator, Split

_LAYER = "model.layers.{layer}"


def _operators(model: ModelConfig) -> Iterator[Operator]:
    size = model.head_size
    yield Split(
        f"{_LAYER}.self_attn.qkv_proj.weight",
        tuple(f"{_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
        sizes=(model.num_heads * size, model.kv_heads * size, model.kv_heads * size),
    )
    yield Split(
        f"{_LAYER}.mlp.gate_up_proj.weight",
        tuple(f"{_LAYER}.mlp.{part}_proj.weight" for part in ("gate", "up")),
    )
    yield from decoder_operators(model)


PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    rules=(
        *with_defaults(SIZES, max_position_embeddings=4096),
        *with_defaults(DRESS, rms_norm_eps=1e-5),
        TIED,
        Windows(),
        Rope(
            default_share=1.0,
            original_length=4096,
            aliases=(("su", "longrope"), ("yarn", "longrope")),
        ),
    ),
    operators=_operators,
)
"""`Phi3ForCausalLM` (Abdin et al., "Phi-3 Technical Report", 2024)."""

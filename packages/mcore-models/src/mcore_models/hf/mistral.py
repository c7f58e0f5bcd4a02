"""Mistral and Mixtral."""

from collections.abc import Iterator

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.experts import expert_operators, joined_experts
from mcore_models.hf.llama import DRESS, SIZES, STACK, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Field, with_defaults
from mcore_models.hf.windows import Windows
from mcore_parallel.mapping import Operator

_SIZES = {"num_key_value_heads": 8, "max_position_embeddings": 131072}

MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    rules=(*with_defaults(SIZES, **_SIZES), *DRESS, TIED, Windows(4096), Rope()),
    operators=decoder_operators,
)
"""`MistralForCausalLM` (Jiang et al., "Mistral 7B", 2023)."""


def _mixtral(model: ModelConfig) -> Iterator[Operator]:
    block, names = "model.layers.{layer}.block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    yield joined_experts(block, names)
    yield from decoder_operators(model)
    yield from expert_operators(block, names)


MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    rules=(
        *with_defaults(STACK, **_SIZES),
        *with_defaults(DRESS, rms_norm_eps=1e-5),
        TIED,
        Field("intermediate_size", "moe.expert_ffn_size", int),
        Field("num_local_experts", "moe.num_experts", int, default=8, also=("num_experts",)),
        Field("num_experts_per_tok", "moe.top_k", int, default=2),
        Windows(),
        Rope(1e6),
    ),
    operators=_mixtral,
)
"""`MixtralForCausalLM` (Jiang et al., "Mixtral of Experts", 2024)."""

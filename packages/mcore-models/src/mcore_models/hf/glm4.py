"""GLM-4.5: a mixture of experts after a few dense layers, with positions in half of each head."""

from collections.abc import Iterator
from dataclasses import replace

from mcore_models.config import ModelConfig
from mcore_models.hf.experts import DenseLayers, SharedExperts, expert_operators, joined_experts
from mcore_models.hf.further import FurtherArchitecture, further_operators, further_repeats
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators, layer_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Choice, Field, Ours, with_defaults
from mcore_parallel.mapping import Inward, Operator, Rename


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield Inward(tuple(further_repeats(model)))
    yield joined_experts()
    yield from further_operators(model, _layer)
    yield from decoder_operators(model)
    yield from _experts("model.layers.{layer}", "layers.{layer}")


def _layer(theirs: str, ours: str) -> Iterator[Operator]:
    yield from layer_operators(theirs, ours)
    yield from _experts(theirs, ours)


def _experts(theirs: str, ours: str) -> Iterator[Operator]:
    block, mine = f"{theirs}.mlp", f"{ours}.moe"
    yield from expert_operators(block, ours=mine)
    yield Rename(f"{block}.gate.e_score_correction_bias", f"{mine}.router.correction")
    yield Rename(
        f"{block}.shared_experts.{{part:gate|up|down}}_proj.weight",
        f"{mine}.shared.{{part}}.weight",
    )


GLM4_MOE = FurtherArchitecture(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=8, max_position_embeddings=131072),
        *with_defaults(DRESS, rms_norm_eps=1e-5),
        TIED,
        Biases(output=False),
        Choice("use_qk_norm", "attention.qk_norm", ((False, None), (True, "head"))),
        Field("n_routed_experts", "moe.num_experts", int, default=128, also=("num_local_experts",)),
        Field("num_experts_per_tok", "moe.top_k", int, default=8),
        Field("moe_intermediate_size", "moe.expert_ffn_size", int, default=1408),
        SharedExperts(),
        Field("n_group", "moe.num_groups", int, default=1),
        Field("topk_group", "moe.top_groups", int, default=1),
        Field("norm_topk_prob", "moe.normalise_top_k", bool, default=True),
        Field("routed_scaling_factor", "moe.scaling_factor", float, default=1.0),
        Ours("moe.score_function", "sigmoid"),
        Ours("moe.group_score_experts", 2),
        Ours("moe.correction_rate", 0.0),
        DenseLayers(default=1),
        Rope(default_share=0.5),
    ),
    operators=_operators,
)
"""`Glm4MoeForCausalLM` (GLM-4.5 Team, "GLM-4.5", 2025)."""

GLM4_MOE_FURTHER = replace(GLM4_MOE, further=True)
"""The same with the layer that predicts a further token, where folders have it."""

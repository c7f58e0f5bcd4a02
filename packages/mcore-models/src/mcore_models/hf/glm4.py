"""GLM-4.5: a mixture of experts after a few dense layers, with positions in half of each head."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.experts import DenseLayers, expert_operators, joined_experts
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Choice, Field, Ours, give, put, with_defaults
from mcore_parallel.mapping import Drop, Inward, Operator, Rename

_BLOCK = "model.layers.{layer}.mlp"


@dataclass(frozen=True)
class SharedExperts:
    """Experts that every token passes, as one MLP; there they have the width of the others."""

    theirs: str = "n_shared_experts"
    default: int = 1

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `moe.shared_ffn_size`."""
        number = config.get(self.theirs)
        number = self.default if number is None else number
        if type(number) is not int or number < 0:
            raise ValueError(f"{self.theirs}={number!r} must be a number of at least 0")
        give(fields, "moe.shared_ffn_size", number * fields["moe"]["expert_ffn_size"])

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set how many of the others' width they are; what is left of one shows when it is read."""
        if model.moe is not None:
            put(config, self.theirs, model.moe.shared_ffn_size // model.moe.expert_ffn_size)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    # Beyond the last layer published folders have one that predicts further tokens.
    further = f"model.layers.{model.num_layers}"
    yield Inward(
        (
            Drop(f"{further}.{{a}}.{{b}}"),
            Drop(f"{further}.{{a}}.{{b}}.{{c}}"),
            Drop(f"{further}.{{a}}.{{b}}.{{c}}.{{d}}"),
            Drop(f"{further}.{{a}}.{{b}}.{{c}}.{{d}}.{{e}}"),
        )
    )
    yield joined_experts()
    yield from decoder_operators(model)
    yield from expert_operators()
    yield Rename(f"{_BLOCK}.gate.e_score_correction_bias", "layers.{layer}.moe.router.correction")
    yield Rename(
        f"{_BLOCK}.shared_experts.{{part:gate|up|down}}_proj.weight",
        "layers.{layer}.moe.shared.{part}.weight",
    )


GLM4_MOE = Architecture(
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

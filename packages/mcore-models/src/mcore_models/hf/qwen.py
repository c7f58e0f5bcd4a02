"""Qwen2, 2.5 and 3, dense and with experts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.blocks import DecodeBlocks, or_blocks
from mcore_models.hf.experts import expert_operators, joined_experts, set_pattern
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Field, Ours, count_of, with_defaults
from mcore_models.hf.windows import Windows, from_layer
from mcore_parallel.mapping import Inward, Operator, Rename

_WINDOWS = Windows(4096, from_layer, switch="use_sliding_window")
_LENGTH = {"max_position_embeddings": 32768}
_QWEN3 = (Ours("attention.qk_norm", "head"), Biases())

QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=32, **_LENGTH),
        *DRESS,
        TIED,
        Ours("attention_bias", True),
        _WINDOWS,
        Rope(),
    ),
    operators=decoder_operators,
)
"""`Qwen2ForCausalLM` (Qwen Team, "Qwen2.5 Technical Report", 2024)."""


def _qwen3(model: ModelConfig) -> Iterator[Operator]:
    yield Inward((DecodeBlocks(),))
    yield from decoder_operators(model)


QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    rules=(
        *with_defaults(SIZES, head_dim=128, num_key_value_heads=32, **_LENGTH),
        *or_blocks(DRESS),
        TIED,
        *_QWEN3,
        _WINDOWS,
        Rope(),
    ),
    operators=_qwen3,
    unwritten=("quantization_config",),
)
"""`Qwen3ForCausalLM` (Qwen Team, "Qwen3 Technical Report", 2025)."""


@dataclass(frozen=True)
class SparseLayers:
    """Which layers have experts: every `decoder_sparse_step`-th but for `mlp_only_layers`."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `pattern`, where not all layers have them."""
        layers = fields["num_layers"]
        dense = self._dense(config, layers)
        if len(dense) == layers:
            raise ValueError(
                f"mlp_only_layers={config.get('mlp_only_layers')!r} and decoder_sparse_step="
                f"{config.get('decoder_sparse_step')!r} leave none of {layers} layers with experts"
            )
        set_pattern(fields, dense)

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """List the layers without experts, unless `config` says so already."""
        dense = set(model.layers_with("-"))
        if self._dense(config, model.num_layers) != dense:
            config["decoder_sparse_step"], config["mlp_only_layers"] = 1, sorted(dense)

    def _dense(self, config: Mapping[str, Any], layers: int) -> set[int]:
        step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if type(step) is not int or step < 1 or not isinstance(without, list):
            raise ValueError(
                f"decoder_sparse_step={step!r} and mlp_only_layers={without!r} must be a number of "
                f"at least 1 and a list"
            )
        return {i for i in range(layers) if i in without or (i + 1) % step}


def _with_experts(model: ModelConfig) -> Iterator[Operator]:
    yield joined_experts()
    yield from decoder_operators(model)
    yield from expert_operators()


_EXPERTS = (
    Field("num_experts", "moe.num_experts", int, default=128, also=("num_local_experts",)),
    Field("num_experts_per_tok", "moe.top_k", int, default=8),
    Field("moe_intermediate_size", "moe.expert_ffn_size", int, default=768),
    Field("norm_topk_prob", "moe.normalise_top_k", bool, default=False),
    SparseLayers(),
)


def _first_half(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Every second layer of the first `max_window_layers` is sliding."""
    count = count_of(config, "max_window_layers", 28)
    return [i % 2 == 0 and i < count for i in range(layers)]


def _with_shared_experts(model: ModelConfig) -> Iterator[Operator]:
    yield from _with_experts(model)
    block, ours = "model.layers.{layer}.mlp", "layers.{layer}.moe"
    part = "{part:gate|up|down}"
    yield Rename(f"{block}.shared_expert.{part}_proj.weight", f"{ours}.shared.{{part}}.weight")
    yield Rename(f"{block}.shared_expert_gate.weight", f"{ours}.shared_gate.weight")


QWEN2_MOE = Architecture(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=16, **_LENGTH),
        *DRESS,
        TIED,
        Field("qkv_bias", "attention_bias", bool, default=True),
        *with_defaults(_EXPERTS, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408),
        Field("shared_expert_intermediate_size", "moe.shared_ffn_size", int, default=5632),
        Ours("moe.shared_gate", True),
        Windows(4096, _first_half, switch="use_sliding_window"),
        Rope(),
    ),
    operators=_with_shared_experts,
)
"""`Qwen2MoeForCausalLM` (Qwen Team, "Qwen2 Technical Report", 2024)."""


def _qwen3_moe(model: ModelConfig) -> Iterator[Operator]:
    yield Inward((DecodeBlocks(),))
    yield from _with_experts(model)


QWEN3_MOE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=4, **_LENGTH),
        *or_blocks(DRESS),
        TIED,
        *_QWEN3,
        *_EXPERTS,
        Windows(4096, switch="use_sliding_window"),
        Rope(),
    ),
    operators=_qwen3_moe,
    unwritten=("quantization_config",),
)
"""`Qwen3MoeForCausalLM` (Qwen Team, "Qwen3 Technical Report", 2025)."""

"""SmolLM3: LLaMA without positions in some layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, give, with_defaults
from mcore_models.hf.windows import Windows


def _without(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have no positions: `no_rope_layers` has a 0 for each."""
    given = config.get("no_rope_layers")
    if given is None:
        period = config.get("no_rope_layer_interval", 4)
        return [(i + 1) % period == 0 for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or {*given} - {0, 1}:
        raise ValueError(f"no_rope_layers={given!r} must be {layers} times 0 or 1")
    return [not turns for turns in given]


@dataclass(frozen=True)
class NopeLayers:
    """Layers without rotary positions (Yang et al., "Rope to Nope and Back Again", 2025)."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `attention.nope_layers`."""
        without = _without(config, fields["num_layers"])
        give(
            fields, "attention.nope_layers", tuple(i for i, is_one in enumerate(without) if is_one)
        )

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """List all layers, unless `config` says so already."""
        wanted = [i in model.attention.nope_layers for i in range(model.num_layers)]
        try:
            is_said = _without(config, model.num_layers) == wanted
        except ValueError:
            is_said = False
        if not is_said:
            config["no_rope_layers"] = [int(not is_one) for is_one in wanted]


SMOLLM3 = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    rules=(
        *with_defaults(SIZES, num_key_value_heads=4, max_position_embeddings=32768),
        *DRESS,
        *with_defaults((TIED,), tie_word_embeddings=True),
        Biases(mlp="mlp_bias"),
        NopeLayers(),
        Windows(None, _without, switch="use_sliding_window"),
        Rope(2e6),
    ),
    operators=decoder_operators,
)
"""`SmolLM3ForCausalLM` (Hugging Face, "SmolLM3", 2025)."""

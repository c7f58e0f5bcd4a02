"""OLMo 2 and 3: norms of outputs, not of inputs, and of a token's queries and keys as a whole."""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import DRESS, SIZES, TIED, decoder_operators
from mcore_models.hf.local_rope import LocalRope
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Ours, with_defaults
from mcore_models.hf.windows import Windows
from mcore_parallel.mapping import Operator

_NORMS = {
    "post_attention_layernorm": "mixer_out_norm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model, _NORMS)


_RULES = (
    *SIZES,
    *with_defaults(DRESS, rms_norm_eps=1e-5),
    TIED,
    Biases(),
    Ours("norm_place", "post"),
    Ours("attention.qk_norm", "all"),
)

OLMO2 = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    rules=(*_RULES, Rope()),
    operators=_operators,
)
"""`Olmo2ForCausalLM` (OLMo Team, "2 OLMo 2 Furious", 2024)."""


def _every_fourth_full(config: Mapping[str, Any], layers: int) -> list[bool]:
    return [bool((i + 1) % 4) for i in range(layers)]


OLMO3 = Architecture(
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    rules=(*_RULES, Windows(4096, _every_fourth_full), LocalRope(Rope(5e5), 5e5)),
    operators=_operators,
)
"""`Olmo3ForCausalLM` (OLMo Team, "Olmo 3", 2025): scaled positions in full layers alone."""

"""Gemma, Gemma 2, and the text models of Gemma 3."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import NORMED, SIZES, TIED, decoder_operators
from mcore_models.hf.local_rope import LocalRope
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Choice, Field, Only, Ours, Power, count_of, with_defaults
from mcore_models.hf.windows import Windows, alternate
from mcore_parallel.mapping import Operator

_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mixer_out_norm",
    "pre_feedforward_layernorm": "post_norm",
    "post_feedforward_layernorm": "feed_forward_out_norm",
}


@dataclass(frozen=True)
class EmbeddingScale:
    """Embeddings multiplied by the square root of their width."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `embedding_scale`."""
        fields["embedding_scale"] = math.sqrt(fields["hidden_size"])

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Nothing: theirs does not say it."""


def _every_sixth_full(config: Mapping[str, Any], layers: int) -> list[bool]:
    period = count_of(config, "_sliding_window_pattern", 6, least=1)
    period = count_of(config, "sliding_window_pattern", period, least=1)
    return [bool((i + 1) % period) for i in range(layers)]


_GEGLUS = (
    ("gelu_pytorch_tanh", "geglu_tanh"),
    ("gelu_new", "geglu_tanh"),
    ("gelu", "geglu"),
)
_FIRST = (
    *SIZES,
    *NORMED,
    TIED,
    Biases(),
    Only("use_bidirectional_attention", False, absent=False),
    Ours("zero_centered_norm", True),
    EmbeddingScale(),
)
_RULES = (
    *_FIRST,
    Choice("hidden_activation", "activation", _GEGLUS),
    Power("query_pre_attn_scalar", "attention.scale", 256, power=-0.5),
    Field("final_logit_softcapping", "logit_softcap", float, default=None, null=True),
    Ours("norm_place", "both"),
)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model, _NORMS)


GEMMA = Architecture(
    name="GemmaForCausalLM",
    model_type="gemma",
    rules=(
        *with_defaults(
            _FIRST,
            head_dim=256,
            max_position_embeddings=8192,
            num_key_value_heads=16,
            tie_word_embeddings=True,
        ),
        # The first releases say gelu and mean its form by tanh.
        Choice("hidden_act", "activation", (*_GEGLUS[:2], ("gelu", "geglu_tanh"))),
        Rope(),
    ),
    operators=decoder_operators,
)
"""`GemmaForCausalLM` (Gemma Team, "Gemma", 2024)."""

GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    rules=(
        *with_defaults(
            _RULES,
            head_dim=256,
            max_position_embeddings=8192,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            final_logit_softcapping=30.0,
        ),
        Field("attn_logit_softcapping", "attention.softcap", float, default=50.0, null=True),
        Windows(4096, alternate),
        Rope(),
    ),
    operators=_operators,
)
"""`Gemma2ForCausalLM` (Gemma Team, "Gemma 2", 2024)."""

GEMMA3 = Architecture(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    rules=(
        *with_defaults(
            _RULES,
            head_dim=256,
            max_position_embeddings=131072,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        Only("attn_logit_softcapping", None),
        Ours("attention.qk_norm", "head"),
        Windows(4096, _every_sixth_full),
        LocalRope(Rope(1e6), 1e4, "rope_local_base_freq"),
    ),
    operators=_operators,
)
"""`Gemma3ForCausalLM`, the text models (Gemma Team, "Gemma 3 Technical Report", 2025)."""

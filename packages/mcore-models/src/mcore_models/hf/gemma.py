"""Gemma 2, and the text models of Gemma 3."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import NORMED, SIZES, TIED, decoder_operators
from mcore_models.hf.rope import Rope
from mcore_models.hf.rules import Biases, Choice, Field, Only, Ours, Scale, give, with_defaults
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


@dataclass(frozen=True)
class LocalRope:
    """Rotary positions with a base of their own in the layers with a window.

    In `rope_parameters` each kind of layer has its own; before, `rope_theta` and `rope_scaling`
    were about full layers, beside `rope_local_base_freq`.
    """

    full: Rope
    local_base: float = 10000.0

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set what `Rope` does, and `attention.local_rope_base`."""
        full, local = self._parts(config)
        self.full.read(full, fields)
        kind = local.get("rope_type", "default")
        if kind != "default":
            raise ValueError(
                f"rope_parameters.sliding_attention.rope_type={kind!r} is not supported: only "
                f"'default' is"
            )
        base = local.get("rope_theta")
        base = self.local_base if base is None else base
        if type(base) not in (int, float):
            raise ValueError(f"rope_local_base_freq={base!r} must be of type float")
        if fields.get("attention", {}).get("window") is not None:
            give(fields, "attention.local_rope_base", float(base))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Say it in the form that is there, else in the older one, which all read."""
        full, local = self._parts(config)
        self.full.write(model, full)
        base = model.attention.local_rope_base
        if base is not None and local.get("rope_theta", self.local_base) != base:
            local["rope_theta"] = base
        if config.get("rope_parameters") is not None:
            given = {**config["rope_parameters"]}
            given["full_attention"] = full["rope_parameters"]
            given["sliding_attention"] = {"rope_type": "default", **local}
            config["rope_parameters"] = given
            return
        config |= full
        if "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]

    def _parts(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what `Rope` reads of full layers, and the parameters of the others."""
        given = config.get("rope_parameters")
        names = ("rope_theta", "rope_scaling", "rope_type")
        outside = {name: config[name] for name in names if name in config}
        if given is None:
            theirs = config.get("rope_local_base_freq")
            return outside, {} if theirs is None else {"rope_theta": theirs}
        if not isinstance(given, Mapping):
            raise ValueError(f"rope_parameters={given!r} is no object")
        parts = [given.get(name) or {} for name in ("full_attention", "sliding_attention")]
        return {"rope_parameters": dict(parts[0]), **outside}, dict(parts[1])


def _every_sixth_full(config: Mapping[str, Any], layers: int) -> list[bool]:
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return [bool((i + 1) % period) for i in range(layers)]


_GEGLUS = (
    ("gelu_pytorch_tanh", "geglu_tanh"),
    ("gelu_new", "geglu_tanh"),
    ("gelu", "geglu"),
)
_RULES = (
    *SIZES,
    *NORMED,
    TIED,
    Choice("hidden_activation", "activation", _GEGLUS),
    Scale("query_pre_attn_scalar", 256),
    Field("final_logit_softcapping", "logit_softcap", float, default=None),
    Biases(),
    Only("use_bidirectional_attention", False, absent=False),
    Ours("zero_centered_norm", True),
    Ours("norm_place", "both"),
    EmbeddingScale(),
)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    yield from decoder_operators(model, _NORMS)


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
        Field("attn_logit_softcapping", "attention.softcap", float, default=50.0),
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
        LocalRope(Rope(1e6)),
    ),
    operators=_operators,
)
"""`Gemma3ForCausalLM`, the text models (Gemma Team, "Gemma 3 Technical Report", 2025)."""

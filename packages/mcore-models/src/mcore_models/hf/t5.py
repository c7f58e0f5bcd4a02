"""T5 of both versions: with ReLU and tied, or gated and with a head of its own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import PLAIN
from mcore_models.hf.rules import Choice, Field, Only, Ours, put
from mcore_parallel.mapping import Drop, Operator, Rename

_LAYERS = {"encoder": ("SelfAttention",), "decoder": ("SelfAttention", "EncDecAttention")}
_ATTENTION = {
    "SelfAttention": ("attention", "input_norm"),
    "EncDecAttention": ("cross_attention", "cross_norm"),
}


def _operators(model: ModelConfig) -> Iterator[Operator]:
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats="shared.weight")
    yield Drop("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    for stack, attentions in _LAYERS.items():
        yield Drop(f"{stack}.embed_tokens.weight", repeats="shared.weight")
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Rename(first, f"{stack}.relative_bias.weight")
        yield Rename(f"{stack}.final_layer_norm.weight", f"{stack}.final_norm.weight")
        theirs, ours = f"{stack}.block.{{layer}}.layer", f"{stack}.layers.{{layer}}"
        for place, attention in enumerate(attentions):
            part, norm = _ATTENTION[attention]
            yield Rename(
                f"{theirs}.{place}.{attention}.{{linear:q|k|v|o}}.weight",
                f"{ours}.{part}.{{linear}}.weight",
            )
            yield Rename(f"{theirs}.{place}.layer_norm.weight", f"{ours}.{norm}.weight")
        last = f"{theirs}.{len(attentions)}"
        linears = {
            "wo": "down",
            **({"wi_0": "gate", "wi_1": "up"} if model.gated else {"wi": "up"}),
        }
        for linear, part in linears.items():
            yield Rename(f"{last}.DenseReluDense.{linear}.weight", f"{ours}.mlp.{part}.weight")
        yield Rename(f"{last}.layer_norm.weight", f"{ours}.post_norm.weight")
    yield Rename("shared.weight", "embedding.weight")


@dataclass(frozen=True)
class _Head:
    """Whether the head is the embedding, and whether what it gets is scaled by hidden_size^-½.

    It is where it is tied, unless `scale_decoder_outputs` says otherwise: a field that some folders
    have because their `tie_word_embeddings` says nothing.
    """

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set both."""
        tied = self._flag(config, "tie_word_embeddings", True)
        scaled = self._flag(config, "scale_decoder_outputs", tied)
        fields["tied_embeddings"] = tied
        fields["logit_scale"] = fields["hidden_size"] ** -0.5 if scaled else 1.0

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set both; the second only where it does not follow from the first."""
        put(config, "tie_word_embeddings", model.tied_embeddings)
        scaled = model.logit_scale != 1
        if scaled != model.tied_embeddings or "scale_decoder_outputs" in config:
            put(config, "scale_decoder_outputs", scaled)

    def _flag(self, config: Mapping[str, Any], name: str, default: bool) -> bool:
        value = config.get(name)
        if value is not None and type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be of type bool")
        return default if value is None else value


T5 = Architecture(
    name="T5ForConditionalGeneration",
    model_type="t5",
    rules=(
        Field("vocab_size", "vocab_size", int),
        Field("d_model", "hidden_size", int, default=512),
        Field("d_kv", "head_dim", int, default=64),
        Field("d_ff", "ffn_size", int, default=2048),
        Field("num_layers", "num_layers", int, default=6),
        Field("num_decoder_layers", "t5.num_decoder_layers", int, default=None),
        Field("num_heads", "num_heads", int, default=8),
        Field("relative_attention_num_buckets", "t5.num_buckets", int, default=32),
        Field("relative_attention_max_distance", "t5.max_distance", int, default=128),
        Field("layer_norm_epsilon", "norm_eps", float, default=1e-6),
        Choice("feed_forward_proj", "activation", (("relu", "relu"), ("gated-gelu", "geglu_tanh"))),
        _Head(),
        Only("is_encoder_decoder", True, absent=True),
        Only("is_decoder", False, absent=False),
        PLAIN,
        Ours("norm", "rms_norm"),
        Ours("position", "none"),
        Ours("attention.scale", 1.0),
    ),
    operators=_operators,
)
"""`T5ForConditionalGeneration` (Raffel et al., 2020; Shazeer, 2020)."""

"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts, one in each layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import PLAIN
from mcore_models.hf.recurrent import drop_below, mamba_fields, mamba_operators
from mcore_models.hf.rules import Choice, Field, Only, Ours, Rule, give, put
from mcore_models.pattern import NO_PART
from mcore_parallel.mapping import Operator, Rename, Stack

_SIZES = {
    **{"num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim"},
    **{"state_size": "ssm_state_size", "num_groups": "n_groups"},
    **{"conv_width": "conv_kernel", "chunk_size": "chunk_size"},
}
_DEFAULTS = {
    **{"num_heads": 128, "head_dim": 64, "state_size": 128},
    **{"num_groups": 8, "conv_width": 4, "chunk_size": 128},
}
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "M", "attention": "*"}
_MIXERS = "M*"


@dataclass(frozen=True)
class _Steps:
    """Step sizes: none is less than the least initial one, and there is no largest."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `mamba.dt_min` and the initial ones."""
        low, high = (
            config.get(name) or default
            for name, default in (("time_step_min", 0.001), ("time_step_max", 0.1))
        )
        for name, value in (("time_step_min", low), ("time_step_max", high)):
            if type(value) not in (int, float):
                raise ValueError(f"{name}={value!r} must be of type float")
        for name, value in (("dt_min", low), ("dt_init_min", low), ("dt_init_max", high)):
            give(fields, f"mamba.{name}", float(value))

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the least and the largest."""
        if model.mamba is not None:
            put(config, "time_step_min", model.mamba.dt_min)
            put(config, "time_step_max", max(model.mamba.dt_init_max, model.mamba.dt_min))


_RULES: Mapping[str, Sequence[Rule]] = {
    "M": (
        *mamba_fields(_SIZES, _DEFAULTS),
        Field("use_bias", "mamba.projection_bias", bool, default=False),
        Field("use_conv_bias", "mamba.conv_bias", bool, default=True),
        Only("mamba_hidden_act", "silu", absent="silu"),
        _Steps(),
    ),
    "*": (
        Field("num_attention_heads", "num_heads", int, default=32),
        Field("num_key_value_heads", "num_kv_heads", int, default=8),
        Field("head_dim", "head_dim", int, default=128),
        Only("sliding_window", None),
    ),
    "-": (Field("intermediate_size", "ffn_size", int, default=21504),),
    "E": (
        Field("n_routed_experts", "moe.num_experts", int, default=8, also=("num_local_experts",)),
        Field("num_experts_per_tok", "moe.top_k", int, default=2),
        Field("moe_intermediate_size", "moe.expert_ffn_size", int, default=7688),
        Field("moe_shared_expert_intermediate_size", "moe.shared_ffn_size", int, default=7688),
        Field("moe_latent_size", "moe.latent_size", int, default=None),
        Field("n_group", "moe.num_groups", int, default=1),
        Field("topk_group", "moe.top_groups", int, default=1),
        Field("norm_topk_prob", "moe.normalise_top_k", bool, default=True),
        Field("routed_scaling_factor", "moe.scaling_factor", float, default=1.0),
        Ours("moe.score_function", "sigmoid"),
        Ours("moe.group_score_experts", 2),
        Ours("moe.correction_rate", 0.0),
        Ours("moe.expert_bias", False),
    ),
}
"""Rules for what layers of a letter have, which mean nothing to a model without such layers."""


@dataclass(frozen=True)
class _Layers:
    """The kinds of layers, and what each kind has: a list of names, or a letter for each."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `num_layers`, `pattern`, and what the parts have."""
        letters = self._letters(config)
        fields["num_layers"] = len(letters)
        fields["pattern"] = tuple(x + NO_PART if x in _MIXERS else NO_PART + x for x in letters)
        for letter, rules in _RULES.items():
            for rule in rules if letter in letters else ():
                rule.read(config, fields)
        if "E" in letters and config.get("mlp_bias"):
            raise ValueError("mlp_bias=True is not supported in layers with experts: only False is")

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set the kinds, in the form that is there; and what the parts have."""
        letters = [x for entry in model.layer_pattern for x in entry.replace(NO_PART, "")]
        for letter, rules in _RULES.items():
            for rule in rules if letter in letters else ():
                rule.write(model, config)
        if not set(letters) <= set(_KINDS):
            return  # shows when it is read
        if config.get("hybrid_override_pattern") is not None:
            put(config, "hybrid_override_pattern", "".join(letters))
        if "layers_block_type" in config or "hybrid_override_pattern" not in config:
            put(config, "layers_block_type", [_KINDS[x] for x in letters])
        if "num_hidden_layers" in config:
            put(config, "num_hidden_layers", len(letters))

    def _letters(self, config: Mapping[str, Any]) -> str:
        given = config.get("layers_block_type")
        if given is None:
            pattern = config.get("hybrid_override_pattern")
            if not isinstance(pattern, str) or not pattern or set(pattern) - set(_KINDS):
                raise ValueError(
                    f"hybrid_override_pattern={pattern!r} is not supported: a letter for each "
                    f"layer, {', '.join(_KINDS)}"
                )
            return pattern
        known = {**{kind: letter for letter, kind in _KINDS.items()}, **_OLDER}
        if not isinstance(given, list) or not given or not all(kind in known for kind in given):
            raise ValueError(
                f"layers_block_type={given!r} is not supported: a list of {', '.join(known)}"
            )
        return "".join(known[kind] for kind in given)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    layer, own = "backbone.layers.{layer}", "layers.{layer}"
    yield from drop_below("mtp")  # predicts further tokens
    yield Rename("backbone.embeddings.weight", "embedding.weight")
    yield Rename("backbone.norm_f.weight", "final_norm.weight")
    for i, letters in enumerate(model.layer_pattern):
        norm = "post_norm" if letters[0] == NO_PART else "input_norm"
        yield Rename(f"backbone.layers.{i}.norm.weight", f"layers.{i}.{norm}.weight")
    if model.mamba is not None:
        yield from mamba_operators(model, f"{layer}.mixer")
    yield Rename(f"{layer}.mixer.{{part:q|k|v|o}}_proj.weight", f"{own}.attention.{{part}}.weight")
    part, kind = "{part:up|down}", "{kind:weight|bias}"
    yield Rename(f"{layer}.mixer.{part}_proj.{kind}", f"{own}.mlp.{{part}}.{{kind}}")
    yield Stack(
        f"{layer}.mixer.experts.{{expert}}.{part}_proj.weight",
        f"{own}.moe.experts.{{part}}.weight",
    )
    yield Rename(f"{layer}.mixer.gate.weight", f"{own}.moe.router.weight")
    yield Rename(f"{layer}.mixer.gate.e_score_correction_bias", f"{own}.moe.router.correction")
    yield Rename(
        f"{layer}.mixer.shared_experts.{part}_proj.weight", f"{own}.moe.shared.{{part}}.weight"
    )
    yield Rename(f"{layer}.mixer.fc1_latent_proj.weight", f"{own}.moe.latent_down.weight")
    yield Rename(f"{layer}.mixer.fc2_latent_proj.weight", f"{own}.moe.latent_up.weight")


NEMOTRON_H = Architecture(
    name="NemotronHForCausalLM",
    model_type="nemotron_h",
    rules=(
        Field("vocab_size", "vocab_size", int, default=131072),
        Field("hidden_size", "hidden_size", int, default=4096),
        Field("max_position_embeddings", "max_positions", int, default=4096),
        Field("layer_norm_epsilon", "norm_eps", float, default=1e-5),
        Field("initializer_range", "init_std", float, default=0.02),
        Choice(
            "mlp_hidden_act",
            "activation",
            (("relu2", "squared_relu"), ("relu", "relu"), ("silu", "silu"), ("gelu", "gelu")),
        ),
        Field("mlp_bias", "mlp_bias", bool, default=False),
        _Layers(),
        Only("attention_bias", False, absent=False),
        Only("mamba_proj_bias", False, absent=False),
        Only("tie_word_embeddings", False, absent=False),
        PLAIN,
        Ours("norm", "rms_norm"),
        Ours("position", "none"),
    ),
    operators=_operators,
)
"""`NemotronHForCausalLM` (NVIDIA, "Nemotron-H", 2025, arXiv:2504.03624)."""

"""Where two models differ in what they compute, whatever way each of them says it."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.parts import TRAINING_FIELDS, MoEConfig

TRAINING_ONLY = frozenset({"dropout", "init_depth_scaled", "init_std"})
"""Fields of `ModelConfig` that matter to training alone."""

_PARTS = ("attention", "rope", "moe", "mamba", "delta_net", "latent", "bert", "t5")
_RECURRENT = ("dt_init_min", "dt_init_max", "a_init_min", "a_init_max", "chunk_size")


def differences(one: ModelConfig, other: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of what differs between two models: `attention.window`, 64, None.

    Values are those in force: a field that is None is what it stands for, and one that means
    nothing to one of them, such as the width of an MLP in a model without one, is left out. So is
    what matters to training alone, but for `TRAINING_ONLY`.
    """
    ones, others = _in_force(one), _in_force(other)
    for name in (name for name in ones if name in others):
        here, there = ones[name], others[name]
        if name in _PARTS and here is not None and there is not None:
            for field in (field.name for field in fields(here)):
                if getattr(here, field) != getattr(there, field):
                    yield f"{name}.{field}", getattr(here, field), getattr(there, field)
        elif here != there:
            yield name, here, there
    if one.num_layers != other.num_layers:
        return
    layers = zip(one.layer_pattern, other.layer_pattern, strict=True)
    for i, (here, there) in enumerate(layers):
        if here != there:
            yield f"layer {i} of pattern", here, there
            return


def _in_force(model: ModelConfig) -> dict[str, Any]:
    """Return all that a model computes by, but for its pattern."""
    letters = set("".join(model.layer_pattern))
    values = {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
    del values["pattern"]
    if letters <= set("*-EMG."):
        del values["linear_bias"]  # the biases of each are compared
    values["num_kv_heads"], values["head_dim"] = model.kv_heads, model.head_size
    values["attention_bias"], values["mlp_bias"] = model.qkv_bias, model.ffn_bias
    values["ffn_size"] = model.mlp_size
    if "-" not in letters:
        del values["ffn_size"]
        if not (model.moe and model.moe.shared_ffn_size):
            del values["mlp_bias"]
    values["attention"] = _attention(model)
    if not model.num_heads and not model.latent and model.position == "rope":
        values["position"] = "none"
    if values["position"] == "rope":
        values["rope"] = replace(model.rope, rotary_dim=model.rotary_size or None)
    else:
        del values["rope"], values["rope_base"]
    if values["position"] == "none":
        del values["max_positions"]
    for name in ("mamba", "delta_net"):
        if values[name] is not None:
            values[name] = _recurrent(values[name])
    if model.t5 is not None:
        below = model.t5.num_decoder_layers or model.num_layers
        values["t5"] = replace(model.t5, num_decoder_layers=below)
    if model.moe is not None:
        values["moe"] = _experts(model, model.moe)
    return values


def _attention(model: ModelConfig) -> Any:
    given = model.attention
    local = tuple(i for i in range(model.num_layers) if given.is_local(i))
    return replace(
        given,
        output_bias=model.output_bias,
        scale=given.scale or (model.head_size or 1) ** -0.5,
        local_layers=local if given.window else None,
    )


def _recurrent(part: Any) -> Any:
    """Return a recurrent mixer without what matters to its first values or to its speed alone."""
    defaults = {field.name: field.default for field in fields(part)}
    return replace(part, **{name: defaults[name] for name in _RECURRENT})


def _experts(model: ModelConfig, moe: MoEConfig) -> MoEConfig:
    """Return experts without what matters to training alone."""
    defaults = {field.name: field.default for field in fields(moe)}
    kept: dict[str, Any] = {name: defaults[name] for name in TRAINING_FIELDS}
    kept["correction_rate"] = None if moe.correction_rate is None else 0.0
    if moe.num_groups == 1:
        kept |= {"top_groups": 1, "group_score_experts": 1}
    return replace(moe, expert_bias=model.expert_bias, **kept)

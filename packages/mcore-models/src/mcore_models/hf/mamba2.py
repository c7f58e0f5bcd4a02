"""Mamba-2 alone: a stack of mixers without attention and feed-forwards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_models.config import ModelConfig
from mcore_models.hf.architecture import Architecture
from mcore_models.hf.llama import PLAIN, TIED
from mcore_models.hf.recurrent import mamba_fields, mamba_operators
from mcore_models.hf.rules import Field, Only, Ours, give, put
from mcore_parallel.mapping import Drop, Inward, Operator, Rename

_SIZES = {
    **{"num_heads": "num_heads", "head_dim": "head_dim", "state_size": "state_size"},
    **{"num_groups": "n_groups", "conv_width": "conv_kernel", "chunk_size": "chunk_size"},
}
_DEFAULTS = {
    **{"num_heads": 128, "head_dim": 64, "state_size": 128},
    **{"num_groups": 8, "conv_width": 4, "chunk_size": 256},
}


@dataclass(frozen=True)
class _StepLimits:
    """The least and largest step size; infinity is written as JSON of transformers has it."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Set `mamba.dt_min` and `mamba.dt_max`."""
        given = config.get("time_step_limit")
        given = [0.0, math.inf] if given is None else given
        limits = [_number(value) for value in given] if isinstance(given, list | tuple) else []
        if len(limits) != 2 or None in limits:
            raise ValueError(f"time_step_limit={given!r} must be two numbers")
        give(fields, "mamba.dt_min", limits[0])
        give(fields, "mamba.dt_max", None if limits[1] == math.inf else limits[1])

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set both, unless they are those that there are without."""
        if model.mamba is not None:
            low, high = model.mamba.dt_limits
            given = config.get("time_step_limit") or [0.0, math.inf]
            if [_number(value) for value in given] != [low, high]:
                config["time_step_limit"] = [low, math.inf if math.isinf(high) else high]


def _number(value: Any) -> float | None:
    """A number, or one that JSON does not have, {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    if value in ("Infinity", "inf"):
        return math.inf
    return float(value) if type(value) in (int, float) else None


@dataclass(frozen=True)
class _Expand:
    """How many times as wide as the model all heads together are."""

    def read(self, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
        """Check it."""
        given = config.get("expand")
        expand, mamba, hidden = (
            2 if given is None else given,
            fields["mamba"],
            fields["hidden_size"],
        )
        inner = mamba["num_heads"] * mamba["head_dim"]
        if type(expand) is not int or expand * hidden != inner:
            raise ValueError(
                f"expand={expand!r} of hidden_size={hidden} are not the {inner} channels of "
                f"num_heads={mamba['num_heads']} with head_dim={mamba['head_dim']}"
            )

    def write(self, model: ModelConfig, config: dict[str, Any]) -> None:
        """Set it, rounded down: what is left of the width shows when it is read."""
        if model.mamba is not None:
            put(config, "expand", model.mamba.inner_size // model.hidden_size)


def _operators(model: ModelConfig) -> Iterator[Operator]:
    embedding, layer = "backbone.embeddings.weight", "backbone.layers.{layer}"
    yield Inward((Rename("backbone.embedding.weight", embedding),))
    if model.tied_embeddings:
        yield Drop("lm_head.weight", repeats=embedding)
    yield Rename(embedding, "embedding.weight")
    yield Rename("backbone.norm_f.weight", "final_norm.weight")
    yield Rename(f"{layer}.norm.weight", "layers.{layer}.input_norm.weight")
    yield from mamba_operators(model, f"{layer}.mixer")


MAMBA2 = Architecture(
    name="Mamba2ForCausalLM",
    model_type="mamba2",
    rules=(
        Field("vocab_size", "vocab_size", int, default=32768),
        Field("hidden_size", "hidden_size", int, default=4096),
        Field("num_hidden_layers", "num_layers", int, default=64),
        Field("layer_norm_epsilon", "norm_eps", float, default=1e-5),
        Field("initializer_range", "init_std", float, default=0.1),
        *mamba_fields(_SIZES, _DEFAULTS),
        Field("use_bias", "mamba.projection_bias", bool, default=False),
        Field("use_conv_bias", "mamba.conv_bias", bool, default=True),
        Field("time_step_min", "mamba.dt_init_min", float, default=0.001),
        Field("time_step_max", "mamba.dt_init_max", float, default=0.1),
        _StepLimits(),
        _Expand(),
        TIED,
        PLAIN,
        Only("hidden_act", "silu", absent="silu"),
        Ours("norm", "rms_norm"),
        Ours("position", "none"),
    ),
    operators=_operators,
)
"""`Mamba2ForCausalLM` (Dao and Gu, "Transformers are SSMs", 2024, arXiv:2405.21060)."""

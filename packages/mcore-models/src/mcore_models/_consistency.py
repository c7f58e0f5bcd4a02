"""What the fields of an architecture demand of each other."""

from typing import TYPE_CHECKING

from mcore_models._checks import nearest_divisors, nearest_multiples
from mcore_models.parts import AttentionConfig, RopeConfig

if TYPE_CHECKING:
    from mcore_models.config import ModelConfig


def check_heads(config: "ModelConfig") -> None:
    """Check numbers and sizes of heads against each other; ValueError names them."""
    heads, kv_heads, hidden = config.num_heads, config.kv_heads, config.hidden_size
    if not heads:
        _check_no_heads(config)
        return
    if heads % kv_heads:
        near = nearest_divisors(heads, kv_heads)
        raise ValueError(
            f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}: "
            f"use num_kv_heads {near}"
        )
    if config.head_dim is None and hidden % heads:
        near = nearest_multiples(hidden, heads)
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_heads={heads}: "
            f"use hidden_size {near}, or give head_dim"
        )
    if config.position != "rope":
        return
    if config.rope.rotary_dim is None and config.head_size % 2:
        raise ValueError(
            f"rotary positions turn pairs of channels and head_dim={config.head_size} is odd: "
            f"use {nearest_multiples(config.head_size, 2)}"
        )
    config.rope.check_size(config.head_size)


def _check_no_heads(config: "ModelConfig") -> None:
    for index, letters in enumerate(config.layer_pattern):
        if "*" in letters:
            raise ValueError(
                f"layer {index} asks for '*', attention, and num_heads is 0: give num_heads"
            )
    for name in ("num_kv_heads", "head_dim"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name}={getattr(config, name)} describes attention, of which num_heads=0 says "
                f"that there is none: leave it out, or give num_heads"
            )


_BIASED = {
    "attention_bias": ("*", "attention"),
    "mlp_bias": ("-E", "a feed-forward part"),
    "linear_bias": ("*-E", "attention or a feed-forward part"),
}
"""Letters of the parts that have the biases which a field gives, and what the letters are."""

_WITHOUT = frozenset("MGD+.")
"""Letters of parts that have none; what others, of somebody's own, have is not known here."""


def _check_biases(config: "ModelConfig") -> None:
    letters = set("".join(config.layer_pattern))
    for name, (biased, parts) in _BIASED.items():
        if getattr(config, name) and letters <= _WITHOUT | (set("*-E") - set(biased)):
            raise ValueError(
                f"{name}={getattr(config, name)} is about {parts}, and no layer of the pattern "
                f"has {' or '.join(map(repr, biased))}: leave it out"
            )


def check_options(config: "ModelConfig") -> None:
    """Check that what is said of one thing does not contradict another; ValueError names both."""
    attention = config.attention
    attention.check_layers(config.num_layers)
    if "*" not in "".join(config.layer_pattern) and attention != AttentionConfig():
        raise ValueError(
            "attention is configured and no layer of the pattern has '*': "
            "put '*' into the pattern, or leave attention out"
        )
    _check_biases(config)
    if config.position != "rope":
        for name, plain in {
            "rope": config.rope == RopeConfig(),
            "attention.local_rope_base": attention.local_rope_base is None,
            "attention.nope_layers": not attention.nope_layers,
        }.items():
            if not plain:
                raise ValueError(
                    f"{name} is about rotary positions and position={config.position!r}: "
                    f"use position='rope', or leave it out"
                )
    if attention.qk_norm == "all" and config.norm != "rms_norm":
        raise ValueError(
            f"attention.qk_norm='all' is an RMS norm and norm={config.norm!r}: "
            f"use qk_norm='head', or norm='rms_norm'"
        )
    if config.norm_place == "sum" and config.residual != "sequential":
        raise ValueError(
            f"norm_place='sum' norms one sum after the other and residual={config.residual!r} "
            f"adds two outputs at once: use residual='sequential'"
        )
    if config.norm != "layer_norm" and not config.norm_bias:
        raise ValueError(f"norm_bias is about layer norms and norm={config.norm!r} has no bias")
    if not config.gated and (config.glu_limit is not None or config.glu_offset):
        raise ValueError(
            f"glu_limit and glu_offset are about activations with a gate (…glu), and "
            f"activation={config.activation!r} has no gate"
        )

"""What the families of models ask of the rest of their configuration."""

from typing import TYPE_CHECKING, Any

from mcore_models.parts import AttentionConfig

if TYPE_CHECKING:
    from mcore_models.config import ModelConfig


def check_family(config: "ModelConfig") -> None:
    """Check that nothing is asked for that the family of the config does not have.

    Raises:
        ValueError: one line that names the field and its only value.
    """
    if config.bert is not None:
        _check_bert(config)
    if config.t5 is not None:
        _check_t5(config)


def _check_bert(config: "ModelConfig") -> None:
    assert config.bert is not None
    wanted: dict[str, tuple[Any, Any, str]] = {
        "attention.causal": (config.attention.causal, False, "its tokens see later ones"),
        "mtp": (config.mtp, None, "it predicts no further tokens"),
        "logit_softcap": (config.logit_softcap, None, "its head has none"),
        "logit_scale": (config.logit_scale, 1, "its head has none"),
    }
    if not config.bert.masked_head:
        tied = config.tied_embeddings, False, "without bert.masked_head nothing is tied"
        wanted["tied_embeddings"] = tied
    for name, (value, only, why) in wanted.items():
        if value != only:
            raise ValueError(f"{name}={value} and bert: {why}, use {name}={only}")


def _check_t5(config: "ModelConfig") -> None:
    """Check that layers are those that an encoder and its reader are made of."""
    plain: dict[str, Any] = {
        **dict.fromkeys(("bert", "mtp", "pattern", "moe", "mamba", "delta_net", "latent")),
        **dict.fromkeys(("linear_bias", "attention_bias"), False),
        "logit_softcap": None,
        "norm_place": "pre",
        "residual": "sequential",
        "residual_scale": 1.0,
        "position": "none",
        "attention": AttentionConfig(scale=config.attention.scale),
    }
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}={getattr(config, name)} and t5: its layers are built with "
                f"{name}={value} alone"
            )
    if config.kv_heads != config.num_heads or not config.num_heads:
        raise ValueError(
            f"num_kv_heads={config.kv_heads} of num_heads={config.num_heads} and t5: each head has "
            f"keys of its own, give num_heads and leave num_kv_heads out"
        )

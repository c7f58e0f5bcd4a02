"""What layers are made of, and which axis each of the parts goes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mcore_models import LatentAttentionConfig, ModelConfig, MoEConfig, MTPConfig, check_layout
from mcore_parallel import ParallelConfig
from mcore_train.config import TrainConfig
from mcore_train.parity.families import family_config
from mcore_train.parity.run import world_size

AXES: tuple[str, ...] = (
    "tp=2",
    "tp=2,sp",
    "pp=2",
    "cp=2,cp-kind=ring",
    "cp=2,cp-kind=all-gather",
    "cp=2,cp-kind=all-to-all",
    "cp=4,cp-kind=two-level:2",
    "ep=2",
    "tp=2,ep=2,etp=1",
)
"""Layouts of one axis each, or of what an axis needs beside it."""

_EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_ffn_size=24, aux_loss_coefficient=0.05)
_GROUPS = dataclasses.replace(
    _EXPERTS,
    num_experts=8,
    score_function="sigmoid",
    num_groups=4,
    top_groups=2,
    correction_rate=0.01,
    scaling_factor=1.5,
)
_CAPACITY = dataclasses.replace(_EXPERTS, capacity_factor=1.0, z_loss_coefficient=0.01)
_SHARED = dataclasses.replace(_EXPERTS, shared_ffn_size=16, shared_gate=True, latent_size=16)


def parts() -> Mapping[str, ModelConfig]:
    """Return a small model of each part of a layer, by what the table calls it."""
    gpt, hybrid = family_config("gpt").model, family_config("hybrid").model
    plain = {"moe": None, "mamba": None, "delta_net": None}

    def of(mixer: str, **fields: object) -> ModelConfig:
        pattern = (f"{mixer}-",) * 3
        return dataclasses.replace(hybrid, **{**plain, "pattern": pattern, **fields})  # type: ignore[arg-type]

    latent = LatentAttentionConfig(
        num_heads=8, kv_rank=12, q_rank=20, head_dim=4, rope_dim=2, value_dim=6
    )
    return {
        "attention": gpt,
        "attention to later tokens (`bert`)": family_config("bert").model,
        "biases for distances, cross-attention (`t5`)": family_config("t5").model,
        "latent attention": of("+", latent=latent, linear_bias=False),
        "Mamba-2": of("M", mamba=hybrid.mamba),
        "gated delta net": of("G", delta_net=hybrid.delta_net),
        "experts by softmax": of("*", moe=_EXPERTS, pattern=("*E",) * 3),
        "experts by sigmoid, in groups, corrected": of("*", moe=_GROUPS, pattern=("*E",) * 3),
        "experts with a capacity": of("*", moe=_CAPACITY, pattern=("*E",) * 3),
        "experts in a latent space, beside shared ones": of("*", moe=_SHARED, pattern=("*E",) * 3),
        "a further token predicted": of("*", mtp=MTPConfig(loss_weight=0.5)),
    }


def part_config(name: str, layout: str) -> TrainConfig:
    """Return how a part is trained under a layout.

    Raises:
        ValueError: it is not, in one line with the reason.
    """
    parallel = ParallelConfig.parse(layout)
    config = dataclasses.replace(family_config("gpt"), model=parts()[name], parallel=parallel)
    check_layout(config.model, config.check_world(world_size(parallel)).parallel)
    return config


def part_table() -> Iterator[str]:
    """Yield the lines of a table in Markdown: each part under each axis, and what is refused."""
    reasons: dict[str, int] = {}
    yield f"| part | {' | '.join(f'`{axis}`' for axis in AXES)} |"
    yield "|---|" + "---|" * len(AXES)
    for name in parts():
        found = []
        for axis in AXES:
            try:
                part_config(name, axis)
                found.append("✓")
            except ValueError as error:
                number = reasons.setdefault(str(error), len(reasons) + 1)
                found.append(f"no ({number})")
        yield f"| {name} | {' | '.join(found)} |"
    for reason, number in reasons.items():
        yield ""
        yield f"({number}) {reason}."

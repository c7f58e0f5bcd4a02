"""The config of a benchmark: random tokens, a constant rate, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mcore_models import preset
from mcore_parallel import ParallelConfig, world_size_from_env
from mcore_train.config import TrainConfig
from mcore_train.load import load_config


def bench_config(
    name: str,
    *,
    layout: str = "",
    world_size: int | None = None,
    seq_length: int = 8192,
    micro_size: int = 1,
    micro_batches: int = 4,
    precision: str = "bf16",
    overrides: Sequence[str] = (),
) -> TrainConfig:
    """Return what `mcore-train bench` trains.

    Args:
        name: a preset of `mcore_models`.
        layout: as `ParallelConfig.parse` reads it; data parallelism takes what is left.
        world_size: processes; None for those of torchrun, or this one alone.
        micro_batches: per replica and step.
        precision: of the config; or "fp8", which is bf16 with linear layers in 8 bits.
        overrides: as `load_config` reads them.

    Raises:
        ValueError: one line with the place and the nearest valid values.
    """
    preset(name)  # an unknown name is told before anything else
    for option, value in (("micro-batches", micro_batches), ("micro-size", micro_size)):
        if value < 1:
            raise ValueError(f"--{option} {value} must be at least 1")
    parallel = ParallelConfig.parse(layout)
    replicas = parallel.resolve(world_size or world_size_from_env()).dp
    assert replicas is not None
    tree: dict[str, Any] = {
        "steps": 1,
        "model": {"preset": name},
        "parallel": asdict(parallel),
        "data": {"mock": True, "seq_length": seq_length},
        "batch": {
            "micro_size": micro_size,
            "global_size": micro_size * micro_batches * replicas,
        },
        "schedule": {"kind": "constant", "lr": 1e-5, "min_lr": 0.0},
        "log": {"progress": False},
        "precision": "bf16" if precision == "fp8" else precision,
    }
    if precision == "fp8":
        tree["low_precision"] = {}
    return load_config(tree, overrides)

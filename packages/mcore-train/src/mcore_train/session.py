"""What one rank trains with, built from a config and a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mcore_kernels import Target
from mcore_models import GPT, TokenBatch, build_model, freeze, import_builders
from mcore_models.adapters import add_lora
from mcore_models.common import Block
from mcore_models.common.encoder_decoder import StackLayer
from mcore_models.low_precision import LowPrecision, check_recipe, use_low_precision
from mcore_parallel import (
    Channel,
    GradientBuckets,
    ParallelMesh,
    RngKey,
    RngStreams,
    ShardedOptimizer,
    data_parallel,
    decay,
)
from mcore_train.config import TrainConfig, WorldPlan
from mcore_train.data import ReplicaData
from mcore_train.optim import LossScaler, build_rule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What models compute in, by the name of the precision."""


class DataSource(Protocol):
    """What a run learns from: `ReplicaData`, or whatever answers like it.

    What a batch is lies between the source and the step that takes it. All ranks make the same
    calls.
    """

    @property
    def validation_sets(self) -> Sequence[str]:
        """The names of what there is to measure the validation loss on; most often `validation`."""
        ...

    def batches(self) -> Iterator[Any]:
        """Yield what one step takes after another, from where the source stands."""
        ...

    def validation_batches(self, name: str) -> list[TokenBatch]:
        """Return this replica's share of a set's samples, equally many on every replica."""
        ...

    def files(self) -> dict[str, Path | bytes]:
        """Return what travels with a checkpoint, by name: the tokenizer's folder."""
        ...

    def state_dict(self, consumed: int) -> dict[str, Any]:
        """Return JSON-able values: `consumed_samples`, and what must fit in order to go on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; ValueError when that is not possible."""
        ...

    def after(self, consumed: int) -> int:
        """Return the samples consumed after the step that follows `consumed`."""
        ...

    def counters(self, consumed: int) -> Mapping[str, float]:
        """Return numbers for the logs after `consumed` samples, by name, the same on every rank."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """Model, gradients, optimizer, random streams, data and pipeline channel of one rank.

    The model holds this rank's part under `mesh`; the same config gives the same global weights
    under every mesh. `scaler` scales the loss in fp16, and is None in other precisions;
    `low_precision` is None where the config has none.
    """

    config: TrainConfig
    plan: WorldPlan
    mesh: ParallelMesh
    model: GPT
    buckets: GradientBuckets
    optimizer: ShardedOptimizer
    rng: RngStreams
    data: DataSource
    channel: Channel
    scaler: LossScaler | None = None
    low_precision: LowPrecision | None = None

    def close(self) -> None:
        """Finish what is under way and release the communicators; all ranks call it together."""
        self.data.close()
        self.optimizer.wait()  # the last gathers of parameters may still be running
        self.channel.close()


def build_session(
    config: TrainConfig, mesh: ParallelMesh, *, data: DataSource | None = None
) -> Session:
    """Build what `config` describes; all ranks of the mesh call it together.

    `data` stands in for the files that `config.data` names.

    Raises:
        ValueError: before anything is built: the config does not fit the mesh, or the data or the
            architecture does not fit the config, or the device cannot multiply as it says.
    """
    plan = config.check_world(mesh.world.size)
    _check_device(config, mesh.device)
    data = ReplicaData(config, mesh) if data is None else data
    model = build_model(
        config.model,
        mesh,
        kernels=config.kernels,
        dtype=DTYPES[config.precision],
        device="meta",  # `data_parallel` gives memory to what this rank keeps of it
        key=RngKey(config.seed),
        recompute=config.recompute,
        builders=import_builders(config.builders),
    )
    if config.lora is not None:
        add_lora(model, config.lora)
    freeze(model, config.freeze)
    low_precision = _use_low_precision(model, config)
    buckets = data_parallel(
        model,
        model.specs(),
        mesh,
        units=_units(model),
        methods=("stage_forward",),
        key=RngKey(config.seed),
    )
    optimizer = ShardedOptimizer(
        buckets,
        build_rule(config.optimizer, mesh.device, adam=config.kernels.adam),
        hyper=decay(config.optimizer.weight_decay),
    )
    optimizer.gather_on_use(model.blocks)
    return Session(
        config=config,
        plan=plan,
        mesh=mesh,
        model=model,
        buckets=buckets,
        optimizer=optimizer,
        rng=RngStreams(seed=config.seed),
        data=data,
        channel=Channel(mesh.pp, device=mesh.device),
        scaler=LossScaler(config.loss_scale) if config.precision == "fp16" else None,
        low_precision=low_precision,
    )


def _check_device(config: TrainConfig, device: torch.device) -> None:
    low = config.low_precision
    if low is not None:
        target = Target.of(device, dtype=DTYPES[config.precision])
        check_recipe(low.chosen, target, emulate=low.emulate)


def _use_low_precision(model: GPT, config: TrainConfig) -> LowPrecision | None:
    low = config.low_precision
    if low is None:
        return None
    found = use_low_precision(model, low.rules(config.model), emulate=low.emulate)
    if found is None:
        raise ValueError(
            f"low_precision: keep={list(low.keep)}, first={low.first} and last={low.last} leave no "
            "linear layer to multiply in few bits: keep fewer, or leave low_precision out"
        )
    return found


def _units(model: GPT) -> list[nn.Module]:
    """The modules whose parameters are gathered together where these are sharded."""
    blocks = (Block, StackLayer)
    units: list[nn.Module] = [m for m in model.modules() if isinstance(m, blocks)]
    if model.config.embeds_at_end:  # used at both ends, and so for as long as the model runs
        return units
    ends = ("embedding", "lm_head")
    return [*units, *(module for name, module in model.named_children() if name in ends)]

"""What one rank trains with, built from a config and a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_models import GPT, build_model
from mcore_parallel import (
    Channel,
    GradientBuckets,
    ParallelMesh,
    RngKey,
    RngStreams,
    ShardedOptimizer,
    decay,
)
from mcore_train.config import TrainConfig, WorldPlan
from mcore_train.data import ReplicaData
from mcore_train.optim import build_rule

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """Model, gradients, optimizer, random streams, data and pipeline channel of one rank.

    The model holds this rank's part under `mesh`; the same config gives the same global weights
    under every mesh.
    """

    config: TrainConfig
    plan: WorldPlan
    mesh: ParallelMesh
    model: GPT
    buckets: GradientBuckets
    optimizer: ShardedOptimizer
    rng: RngStreams
    data: ReplicaData
    channel: Channel

    def close(self) -> None:
        """Finish what is under way and release the communicators; all ranks call it together."""
        self.data.close()
        self.optimizer.wait()  # the last gathers of parameters may still be running
        self.channel.close()


def build_session(config: TrainConfig, mesh: ParallelMesh) -> Session:
    """Build what `config` describes; all ranks of the mesh call it together.

    Raises:
        ValueError: before anything is built: the config does not fit the mesh, or the data or the
            architecture does not fit the config.
    """
    plan = config.check_world(mesh.world.size)
    data = ReplicaData(config, mesh)
    model = build_model(
        config.model,
        mesh,
        kernels=config.kernels,
        dtype=_DTYPES[config.precision],
        key=RngKey(config.seed),
    )
    buckets = GradientBuckets(dict(model.named_parameters()), model.specs(), mesh)
    optimizer = ShardedOptimizer(
        buckets,
        build_rule(config.optimizer),
        hyper=decay(config.optimizer.weight_decay),
    )
    optimizer.gather_on_use(model.layers.values())
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
    )

"""What a rank of each pipeline stage holds, counted on models that are laid out without memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mcore_models.build import build_model
from mcore_models.common.builder import Builder
from mcore_models.config import ModelConfig
from mcore_parallel import ParallelConfig, ParallelMesh
from mcore_parallel.cost import Precision
from mcore_parallel.cost.memory import Held, shards, states


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one rank of a pipeline stage holds in training, besides activations.

    layers: their global indices. dense, experts: trained parameters, padding included, by who sums
    their gradients. parameters, gradients, optimizer: bytes.
    """

    layers: tuple[int, ...]
    dense: int
    experts: int
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return self.parameters + self.gradients + self.optimizer


def memory_per_rank(
    config: ModelConfig,
    parallel: ParallelConfig,
    world_size: int,
    *,
    precision: Precision | None = None,
    builders: Mapping[str, Builder] | None = None,
) -> tuple[StageMemory, ...]:
    """Return what a rank of each pipeline stage of `world_size` ranks holds; starts no process.

    Each stage is built on device "meta", so that a model of any size takes seconds. The ranks of a
    stage hold equally much. By default weights are bf16, gradients fp32 and the optimizer's states
    12 bytes for each parameter (master weight and two moments); where they are sharded is what
    `parallel.sharding` says.

    Raises:
        ValueError: the layout does not fit the world, or cannot carry the architecture.
    """
    parallel = parallel.resolve(world_size)
    first = ParallelMesh.arithmetic(parallel, world_size=world_size, rank=0)
    return tuple(
        _stage(config, parallel, (rank, world_size), precision or Precision(), builders)
        for rank in first.pp.ranks
    )


def _stage(
    config: ModelConfig,
    parallel: ParallelConfig,
    place: tuple[int, int],
    precision: Precision,
    builders: Mapping[str, Builder] | None,
) -> StageMemory:
    rank, world_size = place
    mesh = ParallelMesh.arithmetic(parallel, world_size=world_size, rank=rank)
    model = build_model(
        config, mesh, dtype=torch.bfloat16, device="meta", builders=builders, key=None
    )
    specs, sizes = model.specs(), {True: 0, False: 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            sizes[specs[name].expert] += parameter.numel()
    held = Held(dense=sizes[False], routed=sizes[True])
    parameters, gradients, optimizer = states(held, shards(parallel), precision, parallel.sharding)
    return StageMemory(
        layers=tuple(layer for chunk in model.chunks for layer in chunk),
        dense=sizes[False],
        experts=sizes[True],
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
    )


def table(stages: Sequence[StageMemory]) -> str:
    """Return the stages as lines of text, memory in GiB; equal neighbours share a line."""
    lines = [f"{'stage':>7}{'layers':>8}{'dense':>16}{'experts':>16}"]
    lines[0] += "".join(f"{name:>12}" for name in ("parameters", "gradients", "optimizer", "GiB"))
    start = 0
    for stop in range(1, len(stages) + 1):
        here = stages[start]
        if stop < len(stages) and _numbers(stages[stop]) == _numbers(here):
            continue
        name = f"{start}" if stop - start == 1 else f"{start}-{stop - 1}"
        line = f"{name:>7}{len(here.layers):>8}{here.dense:>16,}{here.experts:>16,}"
        sizes = (here.parameters, here.gradients, here.optimizer, here.total)
        lines.append(line + "".join(f"{size / 2**30:>12.2f}" for size in sizes))
        start = stop
    return "\n".join(lines)


def _numbers(stage: StageMemory) -> tuple[int, int, int]:
    return len(stage.layers), stage.dense, stage.experts

"""Runs of a few steps that are recorded whole, in one process and over ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.common.moe import Router, Routing
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import (
    LayoutTensor,
    ParallelConfig,
    ParallelMesh,
    all_gather_object,
    all_reduce,
    init_from_env,
    launch_local,
)
from mcore_parallel.layout import gather_all
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.config import LogConfig, TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.parity.metric import Record, Report, compare
from mcore_train.pretrain import check_run
from mcore_train.schedules import learning_rate
from mcore_train.session import Session, build_session
from mcore_train.step import Step

LEAST_EPS = 1e-4


def comparable(config: TrainConfig) -> TrainConfig:
    """Return the config in fp32, with an optimizer whose result is not rounding noise.

    A parameter whose true gradient is 0 (a key bias) gets a noisy one, which plain Adam turns into
    ± the learning rate: eps is at least 1e-4. Files and checkpoints are left alone. Nothing is cut
    over ranks and nothing recomputed.
    """
    optimizer = dataclasses.replace(config.optimizer, eps=max(config.optimizer.eps, LEAST_EPS))
    return dataclasses.replace(
        config,
        precision="fp32",
        optimizer=optimizer,
        parallel=ParallelConfig(),
        recompute=RecomputeConfig(),
        device="cpu",
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
    )


def record(config: TrainConfig, mesh: ParallelMesh, steps: int) -> Record | None:
    """Train `steps` steps under `mesh` and return everything on its rank 0 (None elsewhere)."""
    session = build_session(config, mesh)
    margins = _watch_margins(session.model)
    step = Step(session)
    batches = session.data.batches()
    losses: list[float] = []
    auxiliary: list[dict[str, float]] = []
    gradients: dict[str, Tensor] = {}
    for index in range(steps):
        shares = step.accumulate(next(batches), session.rng.next("dropout"))
        loss, *values = shares.totals(mesh)
        losses.append(loss)
        auxiliary.append(dict(zip(shares.auxiliary, values, strict=True)))
        if index == 0:
            gradients = _gather(session.buckets.gradients(), mesh)
        step.update(learning_rate(config.schedule, index, config.steps))
    parameters = _gather(_parameters(session), mesh)
    diverged = _diverged(session)
    nearest = torch.tensor(min(margins), dtype=torch.float64, device=mesh.device)
    margin = float(all_reduce(nearest, mesh.world, "min"))
    session.close()
    session.buckets.close()
    if mesh.rank:
        return None
    return Record(
        losses=tuple(losses),
        gradients=gradients,
        parameters=parameters,
        auxiliary=tuple(auxiliary),
        diverged=diverged,
        margin=margin,
    )


def parity(
    config: TrainConfig, layouts: Sequence[ParallelConfig], *, steps: int = 3
) -> Iterable[Report]:
    """Yield a report for each layout, compared with one process on the CPU.

    The ranks of a layout are processes of this machine. A layout with dp None uses the fewest.
    What the config recomputes is recomputed under the layouts, and kept in the one process.

    Raises:
        ValueError: a layout does not fit the config; before anything runs.
    """
    recompute = config.recompute
    config = dataclasses.replace(comparable(config), steps=max(config.steps, steps))
    worlds = [world_size(layout) for layout in layouts]
    for layout, size in zip(layouts, worlds, strict=True):
        _check_shares(layout, size)
    others = [
        dataclasses.replace(config, parallel=layout, recompute=recompute) for layout in layouts
    ]
    for other, size in zip(others, worlds, strict=True):
        check_run(other, size)
    reference = record(config, ParallelMesh.single(), steps)
    assert reference is not None
    for layout, other, size in zip(layouts, others, worlds, strict=True):
        tree = config_to_tree(other)
        found = launch_local(record_rank, size, tree, steps, preload=(__name__,))[0]
        yield compare(reference, found, layout=layout.describe(), world_size=size)


def _check_shares(layout: ParallelConfig, size: int) -> None:
    """Check that a level of sharding that the layout names has ranks to share among."""
    if layout.sharding not in ("gradients", "parameters"):
        return
    if layout.cp * (layout.resolve(size).dp or 1) == 1:
        raise ValueError(
            f"layout {layout.describe()}: sharding {layout.sharding} over one rank shares nothing: "
            "give dp=2 or more"
        )


def record_rank(tree: Mapping[str, Any], steps: int) -> Record | None:
    """`record` as one rank of the world that this process is in."""
    config = config_from_tree(tree)
    place = init_from_env(device="cpu")
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    try:
        return record(config, mesh, steps)
    finally:
        mesh.close()


def world_size(layout: ParallelConfig) -> int:
    """The number of ranks of a layout; with dp None the fewest that it takes."""
    experts, ranks = layout.ep * (layout.etp or layout.tp), layout.tp * layout.cp
    unit = math.lcm(experts // math.gcd(experts, ranks), layout.replicas)
    least = unit
    while ranks * least // experts % layout.replicas:
        least += unit
    return layout.model_size * (layout.dp or least)


def _watch_margins(model: nn.Module) -> list[float]:
    """Return a list that takes the margin of every choice of a router from now on."""
    margins = [math.inf]

    def watch(module: nn.Module, args: Any, routing: Routing) -> None:
        margins.append(routing.margin())

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(watch)
    return margins


def _parameters(session: Session) -> dict[str, LayoutTensor]:
    tensors = session.optimizer.state_tensors()
    return {key: value for key, value in tensors.items() if key.startswith("model/")}


def _diverged(session: Session) -> tuple[str, ...]:
    """Names of parameters whose copies differ: replicas, tied ones, and those of each dp rank."""
    session.optimizer.wait()
    digests = {}
    for held in session.buckets.parameters().values():
        for fragment, view in held.views():
            data = (
                view.reshape(-1)
                .clone(memory_format=torch.contiguous_format)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
            place = (fragment.name, fragment.box.start, fragment.box.shape)
            digests[place] = hashlib.sha256(data).hexdigest()
    seen: dict[tuple[str, object, object], str] = {}
    diverged: dict[str, None] = {}
    for theirs in all_gather_object(digests, session.mesh.world):
        for place, digest in theirs.items():
            if seen.setdefault(place, digest) != digest:
                diverged[place[0]] = None
    return tuple(diverged)


def _gather(tensors: Mapping[str, LayoutTensor], mesh: ParallelMesh) -> dict[str, Tensor]:
    gathered = gather_all(tensors, mesh.world)
    return {name.partition("/")[2]: value.clone() for name, value in gathered.items()}

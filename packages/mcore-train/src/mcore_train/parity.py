"""Is training under a layout the same as training in one process?

Compares loss, every gradient and the parameters after some steps, by global tensor name, with one
fp32 process. The metric, for a tensor: the norm of the difference is at most 1e-5 times the larger
of the reference's norm and 1e-3 times the norm over all tensors of its kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore_models.common.moe import Router, Routing
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
from mcore_train.config import CheckpointConfig, LogConfig, TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import check_run
from mcore_train.schedules import learning_rate
from mcore_train.session import Session, build_session
from mcore_train.step import Step

TOLERANCE = 1e-5
FLOOR = 1e-3
LEAST_EPS = 1e-4
LEAST_MARGIN = 1e-5
"""Scores of experts that lie nearer to each other may change places by rounding alone."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a training run of a few steps gave: losses, first gradients and last parameters.

    `auxiliary` are the losses of the layers in each step, by name. `diverged` names the tensors
    whose copies on different ranks are not the same, bit for bit. `margin` is how near the router's
    scores of an expert that was chosen and of one that was not have come (infinite without).
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    auxiliary: tuple[Mapping[str, float], ...] = ()
    diverged: tuple[str, ...] = ()
    margin: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one quantity is from the reference, relative to what the metric allows for it.

    `ratio` is the norm of the difference divided by the larger of the reference's norm and the
    floor; `kind` is loss, auxiliary, gradient, parameter or copy.
    """

    kind: str
    name: str
    ratio: float

    @property
    def holds(self) -> bool:
        """Whether it is within the tolerance (a NaN is not)."""
        return self.ratio <= TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Report:
    """The comparison of one layout: all differences, in the order of the model.

    With a `margin` (of the run in one process) below `LEAST_MARGIN` a router's choice might differ
    by rounding alone, and tensors after it: what differs then says little.
    """

    layout: str
    world_size: int
    differences: tuple[Difference, ...]
    margin: float = math.inf

    @property
    def holds(self) -> bool:
        """Whether every difference is within the tolerance."""
        return all(difference.holds for difference in self.differences)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of differences that there are, in order."""
        return tuple(dict.fromkeys(difference.kind for difference in self.differences))

    def worst(self, kind: str) -> Difference:
        """The largest difference of a kind, which must be among `kinds`."""
        of_kind = [d for d in self.differences if d.kind == kind]
        return max(of_kind, key=lambda d: float("inf") if d.ratio != d.ratio else d.ratio)

    def first_failure(self) -> Difference | None:
        """The first difference, in the order of the model, that is out of tolerance."""
        return next((d for d in self.differences if not d.holds), None)


def comparable(config: TrainConfig) -> TrainConfig:
    """Return the config in fp32, with an optimizer whose result is not rounding noise.

    A parameter whose true gradient is 0 (a key bias) gets a noisy one, which plain Adam turns into
    ± the learning rate: eps is at least 1e-4. Files and checkpoints are left alone.
    """
    optimizer = dataclasses.replace(config.optimizer, eps=max(config.optimizer.eps, LEAST_EPS))
    return dataclasses.replace(
        config,
        precision="fp32",
        optimizer=optimizer,
        parallel=ParallelConfig(),
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


def compare(reference: Record, other: Record, *, layout: str, world_size: int) -> Report:
    """Return the differences of `other` from `reference` under the metric."""
    rows = [
        Difference(kind="loss", name=f"step {i}", ratio=abs(a - b) / max(abs(a), 1e-30))
        for i, (a, b) in enumerate(zip(reference.losses, other.losses, strict=True))
    ]
    for i, (mine, theirs) in enumerate(zip(reference.auxiliary, other.auxiliary, strict=True)):
        rows += [
            Difference(
                kind="auxiliary",
                name=f"{name} of step {i}",
                ratio=abs(mine[name] - theirs[name]) / max(abs(mine[name]), 1e-30),
            )
            for name in mine
        ]
    rows += _differences("gradient", reference.gradients, other.gradients)
    rows += _differences("parameter", reference.parameters, other.parameters)
    rows += [Difference(kind="copy", name=name, ratio=math.inf) for name in other.diverged]
    return Report(
        layout=layout, world_size=world_size, differences=tuple(rows), margin=reference.margin
    )


def parity(
    config: TrainConfig, layouts: Sequence[ParallelConfig], *, steps: int = 3
) -> Iterable[Report]:
    """Yield a report for each layout, compared with one process on the CPU.

    The ranks of a layout are processes of this machine. A layout with dp None uses the fewest.

    Raises:
        ValueError: a layout does not fit the config; before anything runs.
    """
    config = dataclasses.replace(comparable(config), steps=max(config.steps, steps))
    worlds = [world_size(layout) for layout in layouts]
    for layout, size in zip(layouts, worlds, strict=True):
        check_run(dataclasses.replace(config, parallel=layout), size)
    reference = record(config, ParallelMesh.single(), steps)
    assert reference is not None
    for layout, size in zip(layouts, worlds, strict=True):
        tree = config_to_tree(dataclasses.replace(config, parallel=layout))
        found = launch_local(record_rank, size, tree, steps)[0]
        yield compare(reference, found, layout=layout.describe(), world_size=size)


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
    experts = layout.ep * (layout.etp or layout.tp)
    least = experts // math.gcd(experts, layout.tp * layout.cp) if layout.ep > 1 else 1
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
    specs = session.model.specs()
    digests = {}
    for name, parameter in session.model.named_parameters():
        for fragment, view in specs[name].layout.views(parameter.detach()):
            data = view.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
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


def _differences(
    kind: str, reference: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> list[Difference]:
    missing = sorted(set(reference) ^ set(other))
    if missing:
        raise ValueError(f"the {kind}s of the two runs have different names: {missing[:3]}")
    norms = [float(torch.linalg.vector_norm(value.double())) for value in reference.values()]
    floor = FLOOR * sum(norm**2 for norm in norms) ** 0.5
    rows = []
    for (name, value), norm in zip(reference.items(), norms, strict=True):
        if value.shape != other[name].shape:
            raise ValueError(
                f"{kind} {name} has shape {list(value.shape)} in one process and "
                f"{list(other[name].shape)} under the layout"
            )
        delta = float(torch.linalg.vector_norm(other[name].double() - value.double()))
        rows.append(Difference(kind=kind, name=name, ratio=delta / max(norm, floor, 1e-30)))
    return rows

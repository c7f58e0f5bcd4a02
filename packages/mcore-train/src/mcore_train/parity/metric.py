"""The metric: how far the run of a layout is from that of one process, by global tensor name.

For a tensor, the norm of the difference is at most 1e-5 times the larger of the reference's norm
and 1e-3 times the norm over all tensors of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-5
FLOOR = 1e-3
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

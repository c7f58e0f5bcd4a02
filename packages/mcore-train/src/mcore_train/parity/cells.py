"""The combinations of parallelism: axes, their values, and which of them go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from mcore_models import ModelConfig, check_layout
from mcore_models.common.recompute import RecomputeConfig
from mcore_parallel import ParallelConfig, RngKey
from mcore_train.config import TrainConfig
from mcore_train.parity.families import FAMILIES, SAMPLES, family_config

RECOMPUTE: Mapping[str, RecomputeConfig] = {
    "none": RecomputeConfig(),
    "full": RecomputeConfig(mode="full"),
    "spread": RecomputeConfig(mode="full", first_layers=1, spread=True),
    "selective": RecomputeConfig(mode="selective", parts=("core_attn", "norm")),
}
AXES: Mapping[str, tuple[str, ...]] = {
    "family": ("moe", "gpt", "hybrid", "bert", "t5"),
    "tensor": ("", "tp=2", "tp=2,sp"),
    "context": (
        "",
        "cp=2,cp-kind=ring",
        "cp=2,cp-kind=all-gather",
        "cp=2,cp-kind=all-to-all",
        "cp=4,cp-kind=two-level:2",
    ),
    "pipeline": (
        "",
        "pp=2,schedule=1f1b",
        "pp=2,schedule=gpipe",
        "pp=2,schedule=interleaved,chunks=2,stages=0+1+1+1,group=3",
        "pp=2,schedule=zb-h1,first=1",
        "pp=2,schedule=zb-v,chunks=2,count-embedding",
    ),
    "experts": ("", "ep=2", "ep=2,etp=1,dispatch=all-gather"),
    "level": ("zero=1", "zero=0", "zero=2", "zero=3"),
    "replica": ("", "twice", "replicas=2"),
    "buckets": ("", "bucket=700", "overlap=0"),
    "recompute": tuple(RECOMPUTE),
    "documents": ("samples", "packed"),
}
"""Values that a combination chooses from; the first of each goes with most of the others."""

_PLACES = {axis: place for place, axis in enumerate(AXES)}
_LAYOUT = ("tensor", "context", "pipeline", "experts", "level", "replica", "buckets")
TABLE_AXES: Mapping[str, tuple[str, ...]] = {
    "family": FAMILIES,
    "tensor": ("", "tp=2"),
    "pipeline": (
        "",
        *(f"pp=2,schedule={kind}" for kind in ("1f1b", "gpipe", "zb-h1")),
        *(f"pp=2,schedule={kind},chunks=2,count-embedding" for kind in ("interleaved", "zb-v")),
    ),
    "context": AXES["context"],
    "experts": ("", "ep=2"),
    "level": ("zero=0", "zero=1", "zero=2", "zero=3"),
    "replica": ("", "replicas=2"),
}
"""The axes of which the full matrix has every combination."""
_FINER = {
    "tp=2": ("tp=2", "tp=2,sp"),
    "ep=2": ("ep=2", "ep=2,etp=1,dispatch=all-gather"),
    "": ("", "twice"),
}
MOST_RANKS = 16


@dataclass(frozen=True)
class Cell:
    """One combination: a value of each axis, in the order of `AXES`."""

    values: tuple[str, ...]

    @staticmethod
    def of(values: Mapping[str, str]) -> Cell:
        """Return the combination of these values, and of the first of every other axis."""
        return Cell(tuple(values.get(axis, known[0]) for axis, known in AXES.items()))

    def __getitem__(self, axis: str) -> str:
        return self.values[_PLACES[axis]]

    def __str__(self) -> str:
        extras = [self["recompute"]] if self["recompute"] != "none" else []
        extras += ["packed"] if self["documents"] == "packed" else []
        return " ".join([self["family"], self.layout or "dp=1", *extras])

    @cached_property
    def layout(self) -> str:
        """The layout, as `ParallelConfig.parse` reads it, with its number of replicas."""
        items = [self[axis] for axis in _LAYOUT if self[axis] not in ("", "zero=1", "twice")]
        return ",".join([*items, f"dp={self._dp}"])

    @cached_property
    def _dp(self) -> int:
        """The fewest replicas with which every axis does something, or twice as many."""
        degrees = {"tp": 1, "cp": 1, "ep": 1, "etp": 0, "replicas": 1}
        for axis in ("tensor", "context", "experts", "replica"):
            for item in self[axis].split(","):
                key, _, value = item.partition("=")
                if key in degrees:
                    degrees[key] = int(value)
        ranks, experts = (
            degrees["tp"] * degrees["cp"],
            degrees["ep"] * (degrees["etp"] or degrees["tp"]),
        )
        replicas = degrees["replicas"]
        dp = math.lcm(experts // math.gcd(experts, ranks), replicas)
        while ranks * dp // experts % replicas:
            dp += replicas
        if dp * degrees["cp"] == 1 and self["level"] != "zero=1":
            dp = 2
        return dp * (2 if self["replica"] == "twice" else 1)

    @property
    def is_packed(self) -> bool:
        """Whether samples are packed with documents that attend to themselves only."""
        return self["documents"] == "packed"

    def config(self, tokens: Path | None = None) -> TrainConfig:
        """Return how the combination is trained.

        Raises:
            ValueError: it does not work, in one line with the reason.
        """
        config = family_config(self["family"], tokens=tokens)
        config = dataclasses.replace(
            config,
            parallel=ParallelConfig.parse(self.layout),
            recompute=_recompute(self["recompute"], config.model),
        )
        plan = config.check_world(self.world_size)
        check_layout(config.model, plan.parallel)
        return config

    @cached_property
    def world_size(self) -> int:
        """The number of its ranks; ValueError when the layout is none."""
        parallel = ParallelConfig.parse(self.layout)
        return parallel.model_size * (parallel.dp or 1)

    @cached_property
    def refusal(self) -> str | None:
        """Why it cannot be trained, or None: what a user who asks for it is told."""
        return _refusal(self)

    @property
    def is_vacuous(self) -> bool:
        """Whether a value says nothing beside the others, or a step has too few samples for it."""
        alone = not self["tensor"] and "etp=1" in self["experts"]
        return alone or self._dp > SAMPLES


def _recompute(name: str, model: ModelConfig) -> RecomputeConfig:
    """What is recomputed under a name; a model that norms sums has no norms before its parts."""
    found = RECOMPUTE[name]
    if found.mode == "selective" and model.norm_place == "sum":
        parts = tuple(part for part in found.parts if part != "norm")
        found = dataclasses.replace(found, parts=parts)
    return found


@cache  # of thousands of combinations, which the matrix and its tables make anew
def _refusal(cell: Cell) -> str | None:
    try:
        cell.config()
    except ValueError as error:
        return str(error)
    return None


def table_matrix() -> Iterator[Cell]:
    """Yield every combination of `TABLE_AXES`, with the first value of every other axis."""
    for values in product(*TABLE_AXES.values()):
        yield Cell.of(dict(zip(TABLE_AXES, values, strict=True)))


def full_matrix() -> Iterator[Cell]:
    """Yield every combination of `TABLE_AXES`, with values of the other axes dealt out evenly.

    A layout of the table also stands for its finer values: sequence parallelism, and experts that
    are not cut. Combinations of more than `MOST_RANKS` are left to larger machines.
    """
    for cell in table_matrix():
        if cell.refusal is not None:
            yield cell
        elif cell.world_size <= MOST_RANKS:
            yield _with_others(cell)


def _with_others(cell: Cell) -> Cell:
    """Choose a value of each other axis, by a hash of the combination, where it fits."""
    key = RngKey(0).fold(*cell.values)
    for axis, known in AXES.items():
        choices = known
        if axis in TABLE_AXES:
            finer = _FINER.get(cell[axis], ())
            choices = finer if set(finer) <= set(known) else ()
        if choices:
            value = choices[key.fold(axis).seed % len(choices)]
            other = Cell.of({**dict(zip(AXES, cell.values, strict=True)), axis: value})
            fits = other.refusal is None and not other.is_vacuous
            if fits and other.world_size <= MOST_RANKS:
                cell = other
    return cell

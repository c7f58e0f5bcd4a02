"""The public names of the package, in one place; `mcore_parallel.cost` passes them on lazily."""

from mcore_parallel.cost.architecture import Counts, LayerShape, ModelShape, count_layer
from mcore_parallel.cost.machines import MACHINES, Link, Machine, Rate, machine
from mcore_parallel.cost.memory import Memory
from mcore_parallel.cost.parts import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    MambaShape,
    MLPShape,
    Part,
)
from mcore_parallel.cost.planner import Estimate, Planner, check_fit, estimate
from mcore_parallel.cost.published import Point, points
from mcore_parallel.cost.ranking import Ranking, ladder, layouts, rank
from mcore_parallel.cost.shapes import SHAPES, shape
from mcore_parallel.cost.work import Precision, Runtime, Workload

__all__ = [
    "MACHINES",
    "SHAPES",
    "AttentionShape",
    "Counts",
    "DeltaNetShape",
    "Estimate",
    "ExpertsShape",
    "LayerShape",
    "Link",
    "MLPShape",
    "Machine",
    "MambaShape",
    "Memory",
    "ModelShape",
    "Part",
    "Planner",
    "Point",
    "Precision",
    "Ranking",
    "Rate",
    "Runtime",
    "Workload",
    "check_fit",
    "count_layer",
    "estimate",
    "ladder",
    "layouts",
    "machine",
    "points",
    "rank",
    "shape",
]

"""One call for every level of sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from mcore_parallel.data.ddp import GradientBuckets, check_specs
from mcore_parallel.data.partition import Partition, flat
from mcore_parallel.data.place import place
from mcore_parallel.mesh import ParallelMesh
from mcore_parallel.rng import RngKey
from mcore_parallel.spec import ParamSpec


def data_parallel(
    model: nn.Module,
    specs: Mapping[str, ParamSpec],
    mesh: ParallelMesh,
    *,
    units: Iterable[nn.Module] = (),
    methods: Sequence[str] = (),
    partition: Partition = flat,
    key: RngKey | None = None,
) -> GradientBuckets:
    """Return the gradients of `model` for `ShardedOptimizer`, as `mesh.config.sharding` says.

    With "none", "optimizer" or "gradients" these are `GradientBuckets` of its parameters. With
    "parameters" the model is changed in place: torch's `fully_shard` cuts its parameters over
    `mesh.dp_shard` (experts: `mesh.edp_shard`) and gathers those of a module while that runs.
    `model.named_parameters()` are then DTensors; `parameters()` of the result has the local slices.
    Every rank must then use the same modules in each forward pass. All ranks of the mesh call it.

    units: modules whose parameters are gathered as one, each when it is called; usually layers.
    methods: names of methods of `model`, besides `forward`, that are called from outside.
    partition: see `GradientBuckets`; parameters that are cut go by slices.
    key: of the initial values of parameters on meta (None: zeros). They get memory on the mesh's
    device; with "parameters" one unit after another, so that the whole model never has any.

    Raises:
        ValueError: a parameter has no spec or one of another shape; units share a parameter; or
            `partition` is to keep parameters whole which sharding cuts.
    """
    if mesh.config.sharding != "parameters":
        params = dict(model.named_parameters())
        check_specs(params, specs)
        by_param = {param: specs[name] for name, param in params.items()}
        place(params.values(), by_param, mesh.device, key)
        return GradientBuckets(params, specs, mesh, partition=partition)
    if partition is not flat:
        raise ValueError(
            "sharding parameters cuts every parameter, and this update rule needs whole ones: use "
            "sharding gradients"
        )
    # Importing fully_shard takes time that the other levels need not spend.
    from mcore_parallel.data.fully import FullySharded

    return FullySharded(model, specs, mesh, units=units, methods=methods, key=key)

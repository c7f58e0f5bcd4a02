"""The time of data parallelism beside the passes: reductions, gathers, the optimizer's update."""

from __future__ import annotations

from mcore_parallel.axes import AxisView
from mcore_parallel.config import ParallelConfig
from mcore_parallel.cost.layer import Passes
from mcore_parallel.cost.machines import Machine, Reach
from mcore_parallel.cost.memory import Held, shards
from mcore_parallel.cost.place import reach
from mcore_parallel.cost.work import Workload


def data_parallel_time(
    config: ParallelConfig,
    machine: Machine,
    work: Workload,
    held: Held,
    passes: Passes,
    *,
    count: int,
) -> float:
    """Return the seconds of reductions and gathers that no computation hides.

    held, passes: parameters of the stage, and what it takes for one of `count` micro-batches.

    Gradients are complete in the backward passes of the last micro-batch, parameters are needed in
    the forward passes of the first. With several chunks all but one have the passes of the others
    to hide behind, of as many micro-batches as pass a chunk together. What is then left, and the
    first or last bucket in any case, is exposed. Sharded gradients are reduced after every
    micro-batch; sharded parameters gathered for every forward and backward as well.
    """
    reduce, gather = _traffic(config, machine, work, held)
    if reduce + gather == 0.0:
        return 0.0
    buckets = max(1.0, held.total / config.bucket_size)
    together = 1
    if config.chunks > 1:
        together = min(count, config.microbatch_group or config.pp)
    hiding = (buckets - 1) / buckets if config.overlap else 0.0
    backward = passes.backward.plus(passes.weight).computing * together * hiding
    forward = passes.forward.computing * together * hiding
    if config.sharding == "parameters":
        return count * (
            _exposed(gather, forward, buckets, config.overlap)
            + _exposed(reduce + gather, backward, buckets, config.overlap)
        )
    times = count if config.sharding == "gradients" else 1
    return times * _exposed(reduce, backward, buckets, config.overlap) + _exposed(
        gather, forward, buckets, config.overlap
    )


def _exposed(comm: float, window: float, buckets: float, overlap: bool) -> float:
    return max(comm - window, comm / buckets) if overlap else comm


def _traffic(
    config: ParallelConfig, machine: Machine, work: Workload, held: Held
) -> tuple[float, float]:
    """Seconds to reduce all gradients once, and to gather all parameters once."""
    dense = _groups(config, machine, ["cp", "dp"], config.dense_view())
    routed = _groups(config, machine, ["edp"], config.expert_view())
    precision, reduce, gather = work.precision, 0.0, 0.0
    for count, (inner, copies) in ((held.dense, dense), (held.routed, routed)):
        gradients = count * precision.gradient
        if config.sharding == "none":
            reduce += inner.all_reduce(gradients)
            continue
        reduce += inner.all_gather(gradients) + copies.all_reduce(gradients / inner.size)
        gather += inner.all_gather(count * precision.parameter)
    return reduce, gather


def _groups(
    config: ParallelConfig, machine: Machine, axes: list[str], view: AxisView
) -> tuple[Reach, Reach]:
    """The ranks that hold shares, and those that hold the same share."""
    axis = axes[-1]
    if config.replicas == 1:
        return reach(machine, view, axes), Reach(machine=machine, size=1, per_node=1)
    split = view.split(axis, config.replicas)
    return reach(machine, split, axes), reach(machine, split, [f"{axis}_copies"])


def optimizer_time(config: ParallelConfig, machine: Machine, work: Workload, held: Held) -> float:
    """Return the seconds of clearing gradients, their norm, and the update of a rank's share.

    The norm reads the gradients; the update reads them again, reads and writes masters and moments,
    and writes the parameters.
    """
    dense, routed = shards(config) if config.sharding != "none" else (1, 1)
    share = held.dense / dense + held.routed / routed
    precision = work.precision
    cleared = held.total if config.sharding in ("none", "optimizer") else share
    moved = cleared * precision.gradient + share * (
        2 * precision.gradient + 2 * precision.optimizer + precision.parameter
    )
    world = config.model_size * (config.dp or 1)
    everyone = Reach(machine=machine, size=world, per_node=min(world, machine.gpus_per_node))
    return machine.stream(moved) + 2 * everyone.latency

"""Time training steps of a config, and set them beside what the device can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mcore_models import TokenBatch, count_parameters, flops_per_token
from mcore_parallel import (
    ParallelMesh,
    all_reduce,
    barrier,
    init_from_env,
    launch_local,
    launched_by_torchrun,
)
from mcore_train.bench.clock import synchronise
from mcore_train.bench.limits import Limits, measure_limits
from mcore_train.bench.split import TimeSplit, split_step
from mcore_train.config import TrainConfig
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.pretrain import check_run, resolve_device
from mcore_train.session import DTYPES, Session, build_session
from mcore_train.step import Step


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How to measure: `warmup` steps that do not count, `steps` that do, `split` one profiled."""

    warmup: int = 3
    steps: int = 6
    split: bool = True

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("steps", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was measured, seen from `rank` (all ranks take part in every step).

    step_seconds: median over the measured steps, `step_range` the fastest and the slowest.
    tokens_per_second and model_flops (per second) are those of one device; model_flops counts what
    the model needs, nothing that is computed twice (`mcore_models.flops_per_token`).
    low_precision: which linear layers multiply in few bits; None: none does.
    peak_bytes: the most memory that tensors took on this device; None on a CPU.
    """

    rank: int
    device: str
    layout: str
    world_size: int
    parameters: int
    seq_length: int
    micro_size: int
    micro_batches: int
    precision: str
    low_precision: str | None
    step_seconds: float
    step_range: tuple[float, float]
    tokens_per_second: float
    model_flops: float
    limits: Limits
    peak_bytes: int | None
    loss: float
    split: TimeSplit | None

    @property
    def ratio(self) -> float:
        """`model_flops` as a fraction of the matmul rate of the same device and process."""
        return self.model_flops / self.limits.matmul_flops

    def row(self) -> dict[str, Any]:
        """All numbers as one JSON-able row."""
        return asdict(self) | {"ratio": self.ratio}


def bench(
    config: TrainConfig, options: BenchOptions | None = None, *, nproc: int | None = None
) -> BenchReport:
    """Measure training steps of `config` and return rank 0's report.

    With `nproc` that many processes are started here; without it this process measures, as one
    rank of torchrun's world where there is one. Nothing is saved and nothing evaluated.

    Raises:
        ValueError: config, world and data do not fit together.
    """
    options = options or BenchOptions()
    if config.batch.growth is not None:
        raise ValueError("batch.ramp and batch.sizes: the steps of a benchmark are of one size")
    if nproc is None or nproc == 1:
        return bench_rank(config_to_tree(config), options)
    if launched_by_torchrun():
        raise ValueError(f"nproc={nproc} within torchrun: it has started the processes already")
    check_run(config, nproc)
    device = resolve_device(config.device)
    report = launch_local(bench_rank, nproc, config_to_tree(config), options, device=device)[0]
    assert isinstance(report, BenchReport)
    return report


def bench_rank(tree: Mapping[str, Any], options: BenchOptions) -> BenchReport:
    """Measure as one rank of the world this process is in (alone without one)."""
    config = config_from_tree(tree)
    place = init_from_env(device=resolve_device(config.device))
    check_run(config, place.world_size)
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    try:
        limits = measure_limits(mesh.device, DTYPES[config.precision])
        session = build_session(config, mesh)
        report = _measure(session, options, limits)
        session.close()
    finally:
        mesh.close()
    return report


def _measure(session: Session, options: BenchOptions, limits: Limits) -> BenchReport:
    config, mesh, device = session.config, session.mesh, session.mesh.device
    step, batches = Step(session), session.data.batches()
    lr = config.schedule.lr

    def one() -> float:
        return step(next(batches), lr=lr, rng=session.rng.next("dropout")).loss

    for _ in range(options.warmup):
        one()
    synchronise(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = [], 0.0
    for _ in range(options.steps):
        start = time.perf_counter()
        loss = one()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    split = _split(step, batches, lr) if options.split else None
    # The slowest rank makes the step: all report the same seconds.
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    seconds = all_reduce(slowest, mesh.world, op="max").tolist()
    median = statistics.median(seconds)
    tokens = config.batch.global_size * config.data.seq_length / mesh.world.size / median
    return BenchReport(
        rank=mesh.rank,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        layout=mesh.config.describe(),
        world_size=mesh.world.size,
        parameters=count_parameters(config.model).total,
        seq_length=config.data.seq_length,
        micro_size=config.batch.micro_size,
        micro_batches=session.plan.micro_batches,
        precision=config.precision,
        low_precision=None if session.low_precision is None else session.low_precision.describe(),
        step_seconds=median,
        step_range=(min(seconds), max(seconds)),
        tokens_per_second=tokens,
        model_flops=tokens * flops_per_token(config.model, config.data.seq_length),
        limits=limits,
        peak_bytes=peak,
        loss=loss,
        split=split,
    )


def _split(step: Step, batches: Iterator[list[TokenBatch]], lr: float) -> TimeSplit:
    session = step.session

    def update() -> None:
        step.update(lr)
        session.optimizer.wait()

    def gradients() -> None:
        step.accumulate(next(batches), session.rng.next("dropout"))

    return split_step(
        gradients, update, session.mesh.device, together=lambda: barrier(session.mesh.world)
    )

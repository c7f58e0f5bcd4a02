"""Training a model from scratch or from a checkpoint: in this process, or over several."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_ckpt.addresses import Place, check_shared, storage_at
from mcore_ckpt.marks import check_directory
from mcore_models import check_layout, import_builders
from mcore_parallel import ParallelMesh, init_from_env, launch_local, launched_by_torchrun
from mcore_train.callbacks import (
    Callback,
    Evaluate,
    MetricsLog,
    Progress,
    SaveCheckpoints,
    StopOnSignal,
)
from mcore_train.config import Device, TrainConfig, WorldPlan
from mcore_train.load import config_from_tree, config_to_tree
from mcore_train.session import build_session
from mcore_train.sources import check_files
from mcore_train.step import StepMetrics
from mcore_train.trainer import Trainer

STOP_GRACE = 3600.0
"""Seconds that the ranks have to finish their step and save after a SIGTERM; a second one kills."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a run ended with, seen from `rank`: the last values, None where there were none.

    `first_step` is where it started from; `checkpoint` its newest one;
    `first_validation_loss` the first of the run, which is that of its start with
    `evaluate.at_start`.
    """

    rank: int
    first_step: int
    step: int
    loss: float | None
    validation_loss: float | None
    first_validation_loss: float | None
    checkpoint: Place | None


class _Last(Callback):
    """Remembers the newest numbers for the summary."""

    def __init__(self) -> None:
        self.first_step = 0
        self.loss: float | None = None
        self.validation_loss: float | None = None
        self.first_validation_loss: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        self.first_step = trainer.step

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.loss = metrics.loss

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        if name != "validation":  # one of several sets
            return
        self.validation_loss = loss
        if self.first_validation_loss is None:
            self.first_validation_loss = loss


def pretrain(config: TrainConfig, *, nproc: int | None = None) -> RunSummary:
    """Train as `config` says and return how it ended.

    With `nproc` that many processes are started on this machine; without it this process trains,
    as one rank of torchrun's world where there is one. Everything is checked before a process is
    started or a model built. On SIGTERM the step in flight is finished, saved, and this returns.

    Raises:
        ValueError: config, world, data and checkpoint do not fit together.
        FloatingPointError: loss or gradient is not finite.
    """
    if nproc is None:
        return run_rank(config_to_tree(config))
    if launched_by_torchrun():
        raise ValueError(f"nproc={nproc} within torchrun: it has started the processes already")
    check_run(config, nproc)
    if nproc == 1:
        return run_rank(config_to_tree(config))
    return pretrain_apart(config, nproc=nproc)


def pretrain_apart(config: TrainConfig, *, nproc: int) -> RunSummary:
    """Train in `nproc` new processes of this machine, also when that is one."""
    check_run(config, nproc)
    device = resolve_device(config.device)
    summary = launch_local(
        run_rank,
        nproc,
        config_to_tree(config),
        device=device,
        stop_grace=STOP_GRACE,
        preload=(__name__,),
    )[0]
    assert isinstance(summary, RunSummary)
    return summary


def check_run(config: TrainConfig, world_size: int) -> WorldPlan:
    """Check config, layout and files against each other, before anything is built.

    Raises:
        ValueError: one line with the place, the numbers and the nearest valid values.
    """
    plan = config.check_world(world_size)
    check_layout(config.model, plan.parallel, import_builders(config.builders))
    check_files(config)
    check_writable("checkpoint.directory", config.checkpoint.directory, world_size)
    check_writable("log.directory", config.log.directory)
    return plan


def check_writable(name: str, folder: Path | str | None, num_ranks: int = 1) -> None:
    """Make the folder that the field `name` gives, if any; ValueError when that cannot be.

    To an address something is written, and taken away again; all ranks have to see it.
    """
    if folder is None:
        return
    try:
        if not isinstance(folder, Path):
            check_shared(folder, num_ranks)
            storage, mark = storage_at(folder), f"write-check-{uuid.uuid4().hex}"
            storage.put(mark, b"")
            storage.remove(mark)
            check_directory(storage)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            check_directory(storage_at(folder))
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{name}={folder} cannot be written: {why}") from None


def run_rank(tree: Mapping[str, Any]) -> RunSummary:
    """Train as one rank of the world this process is in (alone without one)."""
    config = config_from_tree(tree)
    place = init_from_env(device=resolve_device(config.device))
    check_run(config, place.world_size)
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    last = _Last()
    try:
        session = build_session(config, mesh)
        trainer = Trainer(session, [*default_callbacks(config), last])
        trainer.run()
        session.close()
    finally:
        mesh.close()
    return RunSummary(
        rank=mesh.rank,
        first_step=last.first_step,
        step=trainer.step,
        loss=last.loss,
        validation_loss=last.validation_loss,
        first_validation_loss=last.first_validation_loss,
        checkpoint=trainer.checkpoint,
    )


def default_callbacks(config: TrainConfig) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called."""
    # First of all the signal, so that one during the first evaluation is heard.
    callbacks: list[Callback] = [StopOnSignal(), MetricsLog(config.log)]
    if config.log.progress:
        callbacks.append(Progress())
    return [*callbacks, Evaluate(config.evaluate), SaveCheckpoints(config.checkpoint)]


def resolve_device(device: Device) -> Literal["cpu", "cuda"]:
    """`auto` is CUDA where there is any."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device

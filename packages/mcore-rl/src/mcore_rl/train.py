"""Reinforcement learning from a config: in this process, or over several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mcore_ckpt
from mcore_ckpt.addresses import Place
from mcore_data import Tokenizer, load_tokenizer
from mcore_models import check_layout
from mcore_parallel import Group, ParallelMesh, init_from_env, launch_local, launched_by_torchrun
from mcore_rl.callbacks import DrawRewards, EvaluateRewards
from mcore_rl.config import RLConfig
from mcore_rl.engines import RolloutEngines, engine_layout
from mcore_rl.environments import make_environment
from mcore_rl.load import config_from_tree
from mcore_rl.step import PolicyStep
from mcore_rl.tasks import Tasks
from mcore_train import StepMetrics, Trainer, WorldPlan, build_session, config_to_tree
from mcore_train.callbacks import (
    Callback,
    MetricsLog,
    Progress,
    SaveCheckpoints,
    StopOnSignal,
)
from mcore_train.pretrain import STOP_GRACE, check_writable, resolve_device

MEASURE = "reward"


@dataclass(frozen=True, kw_only=True)
class RLSummary:
    """What a run ended with, seen from `rank`; None where there was nothing to measure.

    `first_step` is where it started from. `first_reward` and `reward` are mean rewards of its first
    and last step, `first_held_out` and `held_out` those on held-out tasks, first and last.
    """

    rank: int
    first_step: int
    step: int
    first_reward: float | None
    reward: float | None
    first_held_out: float | None
    held_out: float | None
    checkpoint: Place | None


class _Rewards(Callback):
    """Remembers the first and the last numbers for the summary."""

    def __init__(self) -> None:
        self.first_step = 0
        self.rewards: list[float] = []
        self.held_out: list[float] = []

    def on_start(self, trainer: Trainer) -> None:
        self.first_step = trainer.step

    def on_step(self, trainer: Trainer, metrics: StepMetrics) -> None:
        self.rewards = [*self.rewards[:1], metrics.extra[MEASURE]]

    def on_evaluate(self, trainer: Trainer, name: str, loss: float) -> None:
        self.held_out = [*self.held_out[:1], loss]


def train(config: RLConfig, *, nproc: int | None = None) -> RLSummary:
    """Train as `config` says and return how it ended.

    With `nproc` that many processes are started on this machine; without it this process trains,
    as one rank of torchrun's world where there is one. Everything is checked before a process is
    started or a model built. On SIGTERM the step in flight is finished, saved, and this returns.

    Raises:
        ValueError: config, world, tokenizer, environment and checkpoint do not fit together.
        FloatingPointError: loss or gradient is not finite.
    """
    if nproc is None:
        return run_rank(config_to_tree(config))
    if launched_by_torchrun():
        raise ValueError(f"nproc={nproc} within torchrun: it has started the processes already")
    check_run(config, nproc)
    if nproc == 1:
        return run_rank(config_to_tree(config))
    device = resolve_device(config.device)
    summary = launch_local(
        run_rank,
        nproc,
        config_to_tree(config),
        device=device,
        stop_grace=STOP_GRACE,
        preload=(__name__,),
    )[0]
    assert isinstance(summary, RLSummary)
    return summary


def check_run(config: RLConfig, world_size: int) -> WorldPlan:
    """Check config, layouts, tokenizer and environment against each other.

    Nothing is built; the folders to be written are made.

    Raises:
        ValueError: one line with the place, the numbers and the nearest valid values.
    """
    plan = config.training().check_world(world_size)
    if plan.parallel.cp > 1:
        raise ValueError(
            f"cp={plan.parallel.cp}: rollouts are trained on whole, not cut over context-parallel "
            f"ranks; use cp=1"
        )
    check_layout(config.model, plan.parallel)
    check_layout(config.model, engine_layout(config, world_size))
    make_environment(config.environment.name, **config.environment.options)
    _open_tokenizer(config)
    check_writable("checkpoint.directory", config.checkpoint.directory, world_size)
    check_writable("log.directory", config.log.directory)
    return plan


def run_rank(tree: Mapping[str, Any]) -> RLSummary:
    """Train as one rank of the world this process is in (alone without one)."""
    config = config_from_tree(tree)
    place = init_from_env(device=resolve_device(config.device))
    check_run(config, place.world_size)
    mesh = ParallelMesh.create(config.parallel, device=place.device)
    assert mesh is not None
    rewards = _Rewards()
    try:
        tokenizer = _open_tokenizer(config)
        tasks = Tasks(config, tokenizer, reference=_starting_point(config, mesh.world))
        session = build_session(config.training(), mesh, data=tasks)
        engines = RolloutEngines(config, session, tokenizer)
        step = PolicyStep(config, session, engines, tasks)
        callbacks = [*default_callbacks(config, engines), rewards]
        trainer = Trainer(session, callbacks, step=step)
        trainer.run()
        engines.close()
        session.close()
    finally:
        mesh.close()
    return RLSummary(
        rank=mesh.rank,
        first_step=rewards.first_step,
        step=trainer.step,
        first_reward=rewards.rewards[0] if rewards.rewards else None,
        reward=rewards.rewards[-1] if rewards.rewards else None,
        first_held_out=rewards.held_out[0] if rewards.held_out else None,
        held_out=rewards.held_out[-1] if rewards.held_out else None,
        checkpoint=trainer.checkpoint,
    )


def default_callbacks(config: RLConfig, engines: RolloutEngines) -> list[Callback]:
    """The callbacks of a run, in the order in which they are called."""
    callbacks: list[Callback] = [StopOnSignal(), MetricsLog(config.log, measure=MEASURE)]
    if config.log.progress:
        callbacks.append(Progress(measure=MEASURE))
    callbacks += [EvaluateRewards(config.evaluate, engines), SaveCheckpoints(config.checkpoint)]
    if config.log.directory is not None:
        callbacks.append(DrawRewards(config.log.directory))
    return callbacks


def _open_tokenizer(config: RLConfig) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer)
    rows, ids = config.model.vocab_size, tokenizer.vocab_size
    if rows < ids:
        raise ValueError(
            f"model.vocab_size={rows} is smaller than the {ids} tokens of {config.tokenizer}: "
            f"use vocab_size {ids} or more"
        )
    return tokenizer


def _starting_point(config: RLConfig, world: Group) -> Place | None:
    """The checkpoint that a new run of this config starts from, None for random weights."""
    if config.checkpoint.load is None:
        return None
    found = mcore_ckpt.find(config.checkpoint.load, world)
    return None if found is None else found.path

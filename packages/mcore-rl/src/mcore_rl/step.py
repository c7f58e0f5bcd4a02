"""One step of reinforcement learning: act, compare, learn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import cast

import torch

from mcore_models import TokenBatch
from mcore_parallel import RngKey
from mcore_rl.advantages import group_advantages
from mcore_rl.batch import PolicyBatch, micro_batches
from mcore_rl.config import RLConfig
from mcore_rl.engines import RolloutEngines
from mcore_rl.objective import GAP_MAX, GAP_MEAN, PolicyObjective
from mcore_rl.reference import ReferencePolicy
from mcore_rl.rollout import Rollout
from mcore_rl.tasks import Tasks
from mcore_train import Session, Step, StepMetrics


class PolicyStep:
    """Plays rollouts with the newest weights and learns from them; satisfies `TrainStep`.

    `StepMetrics.extra` holds `reward` (mean), `reward_std`, `response_length` (mean number of
    tokens that the policy wrote), the numbers of `PolicyObjective`, the model's auxiliary losses,
    and the seconds of both halves. With several updates the numbers are means over them, but the
    log-probability difference is that of the first: before anything has changed.
    """

    def __init__(
        self, config: RLConfig, session: Session, engines: RolloutEngines, tasks: Tasks
    ) -> None:
        self.config = config
        self.session = session
        self.engines = engines
        self.tasks = tasks
        self.objective = PolicyObjective(
            config.loss,
            engines.rule,
            sequences=config.batch.global_size,
            max_tokens=config.rollout.max_tokens * config.rollout.max_turns,
        )
        self.step = Step(session, self.objective)
        self.reference: ReferencePolicy | None = None

    def __call__(
        self, batches: Sequence[int], *, lr: float, rng: RngKey, stop: bool = False
    ) -> StepMetrics:
        """Run one step on these tasks; see `mcore_train.Step` for what it raises."""
        started = time.perf_counter()
        self.engines.update_weights()
        rollouts = self.engines.train(batches)
        played = time.perf_counter()
        prepared: list[TokenBatch] = [*self._prepare(rollouts)]
        passes: list[StepMetrics] = []
        numbers: list[dict[str, float]] = []
        for update in range(self.config.updates):
            passes.append(self.step(prepared, lr=lr, rng=rng.fold(update), stop=stop))
            numbers.append(self.objective.take(self.session.mesh, passes[-1].tokens))
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        extra = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(correction=0)),
            "response_length": fmean(rollout.response_length for rollout in rollouts),
            **_means(numbers),
            **{name: numbers[0][name] for name in (GAP_MEAN, GAP_MAX)},
            **_means([one.extra for one in passes]),
            "rollout_seconds": round(played - started, 4),
            "update_seconds": round(time.perf_counter() - played, 4),
        }
        return StepMetrics(
            loss=fmean(one.loss for one in passes),
            tokens=passes[-1].tokens,
            grad_norm=fmean(one.grad_norm for one in passes),
            lr=lr,
            stop=any(one.stop for one in passes),
            extra=extra,
        )

    def _prepare(self, rollouts: Sequence[Rollout]) -> list[PolicyBatch]:
        """Return this replica's micro-batches of all rollouts."""
        mesh, config = self.session.mesh, self.config
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        groups = rewards.view(-1, config.rollout.group_size)
        advantages = group_advantages(groups, kind=config.advantages).flatten().tolist()
        size = len(rollouts) // mesh.dp.size
        mine = slice(mesh.dp.rank * size, (mesh.dp.rank + 1) * size)
        batches = [
            cast(PolicyBatch, batch.to(mesh.device))
            for batch in micro_batches(
                rollouts[mine],
                advantages[mine],
                config.batch.micro_size,
                multiple_of=mesh.tp.size if mesh.config.sequence_parallel else 1,
            )
        ]
        return self._with_reference(batches) if config.loss.needs_reference else batches

    def _with_reference(self, batches: Sequence[PolicyBatch]) -> list[PolicyBatch]:
        if self.reference is None:  # only now is it known what the run started from
            self.reference = ReferencePolicy(
                self.config, self.session, self.engines.rule, self.tasks.reference
            )
        return self.reference.attach(batches)


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in found) for name in found[0]}

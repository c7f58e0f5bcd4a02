"""The acting side: engines that hold the newest weights and play episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mcore_data import Tokenizer
from mcore_inference import LLM, SamplingParams, WeightLink
from mcore_models import build_model
from mcore_parallel import Group, ParallelConfig, ParallelMesh, RngKey, all_gather_object
from mcore_rl.config import RLConfig
from mcore_rl.environments import Environment, make_environment
from mcore_rl.log_probs import LogProbs
from mcore_rl.rollout import Rollout, play_together
from mcore_train import Session

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RolloutEngines:
    """This rank's engine, one of several over the world, and its link to the trainer.

    The trainer's ranks are cut into engines of `rollout.tp` ranks each. Tasks are shared out over
    the engines, and every rank gets the rollouts of all of them. Weights go from the trainer's
    layout into the engines' in place (`WeightLink`), also where both lie on the same ranks.

    All ranks construct it and make the same calls.
    """

    def __init__(self, config: RLConfig, session: Session, tokenizer: Tokenizer) -> None:
        world = session.mesh.world
        self.config = config
        self.session = session
        self.world = world
        mesh = ParallelMesh.create(
            engine_layout(config, world.size), ranks=world.ranks, device=session.mesh.device
        )
        assert mesh is not None
        self.mesh = mesh
        model = build_model(
            config.model,
            mesh,
            kernels=config.kernels,
            dtype=DTYPES[config.rollout.precision or config.precision],
            key=None,
        )
        self.llm = LLM(
            model,
            tokenizer,
            max_sequences=config.rollout.max_sequences,
            max_batch_tokens=config.rollout.max_batch_tokens,
        )
        self.rule = log_prob_rule(config, tokenizer)
        self.link = WeightLink(session.buckets.parameters(), model, world)
        self.fresh = False  # the engine's weights are zeros until the first update

    def update_weights(self) -> None:
        """Take over the trainer's weights, unless the engines have them already.

        Their version is the number of optimizer steps behind them.
        """
        version = self.session.optimizer.step_count
        if self.fresh and self.llm.engine.weights_version == version:
            return
        self.session.optimizer.wait()
        self.llm.update_weights(self.link, version=version)
        self.fresh = True

    def train(self, tasks: Sequence[int]) -> list[Rollout]:
        """Play a group of rollouts of every task, as the config says; group by group."""
        key = RngKey(self.config.seed).fold("rollouts")
        return self._play(
            tasks, self.config.rollout.group_size, self.config.rollout.sampling(), key
        )

    def evaluate(self, tasks: Sequence[int]) -> list[Rollout]:
        """Play one episode of every task, at the temperature of `evaluate`."""
        sampling = dataclasses.replace(
            self.config.rollout.sampling(), temperature=self.config.evaluate.temperature
        )
        return self._play(tasks, 1, sampling, RngKey(0).fold("evaluation"))

    def close(self) -> None:
        """Release the communicators; all ranks call it together."""
        self.mesh.close()

    def _play(
        self, tasks: Sequence[int], samples: int, sampling: SamplingParams, key: RngKey
    ) -> list[Rollout]:
        engines = self.mesh.dp
        bounds = [len(tasks) * i // engines.size for i in range(engines.size + 1)]
        mine = tasks[bounds[engines.rank] : bounds[engines.rank + 1]]
        outcome: list[Rollout] | Exception
        try:
            outcome = play_together(
                self.llm,
                self._environment,
                mine,
                samples=samples,
                rule=self.rule,
                sampling=sampling,
                key=key,
                max_turns=self.config.rollout.max_turns,
            )
        except Exception as error:  # raised below, on every rank: the others wait for rollouts
            outcome = error
        return _joined(outcome, engines)

    def _environment(self) -> Environment:
        environment = self.config.environment
        return make_environment(environment.name, **environment.options)


def engine_layout(config: RLConfig, world_size: int) -> ParallelConfig:
    """Return how the world is cut into engines.

    Raises:
        ValueError: the ranks of an engine do not divide the world.
    """
    tp = config.rollout.tp
    if world_size % tp:
        raise ValueError(
            f"rollout.tp={tp} does not divide the {world_size} processes: use a divisor"
        )
    return ParallelConfig(tp=tp, dp=world_size // tp)


def log_prob_rule(config: RLConfig, tokenizer: Tokenizer) -> LogProbs:
    """Return the rule by which engine and trainer take log-probabilities in this run."""
    return LogProbs(
        kind=config.rollout.log_probs,
        sampling=config.rollout.sampling(),
        num_ids=tokenizer.vocab_size,
    )


def _joined(outcome: list[Rollout] | Exception, engines: Group) -> list[Rollout]:
    joined: list[Rollout] = []
    for part in all_gather_object(outcome, engines):
        if isinstance(part, Exception):
            raise part
        joined += part
    return joined

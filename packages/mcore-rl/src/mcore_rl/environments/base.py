"""What an environment is: tasks by seed, observations in text, rewards in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an action led to.

    `observation` is the text shown next (empty when the episode is over), `reward` what this action
    earned, `done` whether the episode is over, `info` JSON-able details for logs and stores.
    """

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """A source of episodes, single-turn or multi-turn.

    An episode is one `reset` and then `step` until `done`. It is a pure function of the seed and
    of the actions, so that a group of rollouts of one task shares its seed, and so that an episode
    can be replayed. An instance plays one episode at a time; instances are cheap.
    """

    name: str

    def reset(self, seed: int) -> str:
        """Begin the episode of task `seed` and return the first observation (the prompt)."""
        ...

    def step(self, action: str) -> StepResult:
        """Take the policy's text and return what it led to.

        Raises:
            RuntimeError: before `reset`, or after the episode is over.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A finished episode: observations and actions in turn, and the reward of every action."""

    environment: str
    seed: int
    observations: tuple[str, ...]
    actions: tuple[str, ...]
    rewards: tuple[float, ...]
    info: tuple[Mapping[str, Any], ...]

    @property
    def total_reward(self) -> float:
        """The sum of the rewards."""
        return sum(self.rewards)


class Policy(Protocol):
    """Anything that answers an observation in text: a model, a person, a script."""

    def __call__(self, observations: tuple[str, ...], actions: tuple[str, ...]) -> str:
        """Return the next action, given the observations so far and the actions between them."""
        ...


def play(environment: Environment, policy: Policy, seed: int, *, max_turns: int = 16) -> Episode:
    """Play one episode and return it.

    Raises:
        RuntimeError: the episode is not over after `max_turns` actions.
    """
    observations = [environment.reset(seed)]
    actions: list[str] = []
    results: list[StepResult] = []
    while not (results and results[-1].done):
        if len(actions) == max_turns:
            raise RuntimeError(
                f"{environment.name} seed {seed} is not over after {max_turns} turns: "
                f"raise max_turns"
            )
        actions.append(policy(tuple(observations), tuple(actions)))
        results.append(environment.step(actions[-1]))
        if not results[-1].done:
            observations.append(results[-1].observation)
    return Episode(
        environment=environment.name,
        seed=seed,
        observations=tuple(observations),
        actions=tuple(actions),
        rewards=tuple(result.reward for result in results),
        info=tuple(result.info for result in results),
    )

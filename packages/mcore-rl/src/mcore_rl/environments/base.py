"""What an environment is: tasks by seed, observations in text, rewards in numbers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_LARGEST = 3.4e38
"""Rewards become fp32."""


class EpisodeError(RuntimeError):
    """An environment failed, or returned what none may; one line says which, on what, and where.

    It is made of text alone, so that it reaches every rank whatever the environment raised.
    """


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
        EpisodeError: as `begin` and `advance` do.
    """
    observations = [begin(environment, seed)]
    actions: list[str] = []
    results: list[StepResult] = []
    while not (results and results[-1].done):
        if len(actions) == max_turns:
            raise RuntimeError(
                f"{environment.name} seed {seed} is not over after {max_turns} turns: "
                f"raise max_turns"
            )
        actions.append(policy(tuple(observations), tuple(actions)))
        results.append(advance(environment, seed, actions[-1]))
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


def begin(environment: Environment, seed: int) -> str:
    """Reset an environment, and return the first observation.

    Raises:
        EpisodeError: it failed, or showed something else than text.
    """
    place = f"environment {environment.name}, task {seed}: reset"
    observation = _called(lambda: environment.reset(seed), place)
    if not isinstance(observation, str) or not observation:
        raise EpisodeError(f"{place} returned {_short(observation)}, which is no text to answer")
    return observation


def advance(environment: Environment, seed: int, action: str) -> StepResult:
    """Take an action in the episode of task `seed`; the reward that comes back is a float.

    Raises:
        EpisodeError: the environment failed, or returned no `StepResult`, or a reward that is no
            number, not finite or too large for fp32.
    """
    place = f"environment {environment.name}, task {seed}: step({_short(action)})"
    result = _called(lambda: environment.step(action), place)
    if not isinstance(result, StepResult):
        raise EpisodeError(f"{place} returned {_short(result)}, which is no StepResult")
    if not isinstance(result.observation, str):
        seen = _short(result.observation)
        raise EpisodeError(f"{place} returned the observation {seen}, which is no text")
    try:
        reward = math.nan if isinstance(result.reward, str) else float(result.reward)
    except (TypeError, ValueError, RuntimeError):  # the last from tensors of several numbers
        reward = math.nan
    if not abs(reward) <= _LARGEST:
        seen = _short(result.reward)
        raise EpisodeError(f"{place} returned the reward {seen}, which is no finite number of fp32")
    return replace(result, reward=reward)


def _called(call: Callable[[], T], place: str) -> T:
    """Return what `call` returns; its errors name the place, and the line that raised."""
    try:
        return call()
    except Exception as error:
        reason = " ".join(str(error).split())
        frames = traceback.extract_tb(error.__traceback__)[2:]  # without this one and the lambda
        own = [frame for frame in frames if frame.filename == frames[0].filename]
        line = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        raise EpisodeError(f"{place} raised {type(error).__name__}: {reason}{line}") from error


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."

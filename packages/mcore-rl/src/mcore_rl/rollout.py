"""Episodes played by an engine, many at a time, with what is needed to learn from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mcore_inference import LLM, SamplingParams
from mcore_parallel import RngKey
from mcore_rl.environments import Environment, Episode, StepResult
from mcore_rl.environments.base import advance, begin
from mcore_rl.log_probs import LogProbs


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An episode as tokens: observations and actions in turn, as the policy saw and wrote them.

    Attributes:
        task: the seed of the environment's task.
        sample: which of the task's rollouts it is.
        tokens: all of them; an action's end token belongs to it.
        own: for each token whether the policy wrote it.
        logprobs: for each token how probable the engine found it (see `LogProbs`), 0 at those that
            the policy did not write.
        episode: the same in text, with the rewards.
        weights_version: of the weights that wrote all of it.
    """

    task: int
    sample: int
    tokens: tuple[int, ...]
    own: tuple[bool, ...]
    logprobs: tuple[float, ...]
    episode: Episode
    weights_version: int

    @property
    def reward(self) -> float:
        """The sum of the episode's rewards."""
        return self.episode.total_reward

    @property
    def response_length(self) -> int:
        """How many tokens the policy wrote."""
        return sum(self.own)


class _Play:
    """One episode under way."""

    def __init__(self, environment: Environment, task: int, sample: int) -> None:
        self.environment = environment
        self.task = task
        self.sample = sample
        self.observations = [begin(environment, task)]
        self.actions: list[str] = []
        self.results: list[StepResult] = []
        self.tokens: list[int] = []
        self.own: list[bool] = []
        self.logprobs: list[float] = []
        self.weights_version = 0

    @property
    def done(self) -> bool:
        return bool(self.results) and self.results[-1].done

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Take tokens of an observation, or of an action with their log-probabilities."""
        self.tokens += tokens
        self.own += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def act(self, action: str) -> None:
        self.actions.append(action)
        self.results.append(advance(self.environment, self.task, action))
        if not self.done:
            self.observations.append(self.results[-1].observation)

    def rollout(self) -> Rollout:
        return Rollout(
            task=self.task,
            sample=self.sample,
            tokens=tuple(self.tokens),
            own=tuple(self.own),
            logprobs=tuple(self.logprobs),
            weights_version=self.weights_version,
            episode=Episode(
                environment=self.environment.name,
                seed=self.task,
                observations=tuple(self.observations),
                actions=tuple(self.actions),
                rewards=tuple(result.reward for result in self.results),
                info=tuple(result.info for result in self.results),
            ),
        )


def play_together(
    llm: LLM,
    make: Callable[[], Environment],
    tasks: Sequence[int],
    *,
    samples: int,
    rule: LogProbs,
    sampling: SamplingParams,
    key: RngKey,
    max_turns: int = 1,
) -> list[Rollout]:
    """Play `samples` episodes of every task, all at once, and return them task by task.

    A turn is one batched generation for all episodes that are not over. After `max_turns` actions
    an episode is cut off, with the rewards so far. A sample depends on `key`, the task, its number
    and the turn, not on what else is played. All ranks of the engine's mesh make the same call.

    Args:
        llm: the policy.
        make: makes an environment; every episode gets its own.
        tasks: seeds.
        samples: episodes of each task.
        rule: which log-probabilities to keep.
        sampling: how to draw tokens; its seed is not used.
        key: root of the random numbers.
        max_turns: actions per episode at most.

    Raises:
        EpisodeError: an environment failed, or returned what none may.
        ValueError: a prompt does not fit the model.
    """
    plays = [_Play(make(), task, sample) for task in tasks for sample in range(samples)]
    for play in plays:
        play.append(llm.tokenizer.encode(play.observations[0]), None)
    for turn in range(max_turns):
        active = [play for play in plays if not play.done]
        if not active:
            break
        params = [
            replace(sampling, seed=key.fold(play.task, play.sample, turn).seed) for play in active
        ]
        completions = llm.generate([play.tokens for play in active], params)
        for play, completion in zip(active, completions, strict=True):
            play.append(completion.token_ids, rule.behaviour(completion))
            play.weights_version = completion.weights_version
            play.act(completion.text)
            if not play.done and turn + 1 < max_turns:
                play.append(llm.tokenizer.encode(play.observations[-1]), None)
    return [play.rollout() for play in plays]

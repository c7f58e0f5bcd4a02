"""Episodes played together are those played alone, and their tokens are what the policy saw."""

import sys
from pathlib import Path

import pytest

from mcore_data import ByteTokenizer
from mcore_inference import LLM, SamplingParams
from mcore_models import build_model
from mcore_parallel import RngKey
from mcore_rl import LogProbs, Rollout, StepResult, make_environment, play_together

sys.path.append(str(Path(__file__).parent))
from small_runs import VOCABULARY, model_config

TOKENIZER = ByteTokenizer()
SAMPLING = SamplingParams(max_tokens=4, temperature=1.0)
RULE = LogProbs(kind="processed", sampling=SAMPLING, num_ids=VOCABULARY)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(build_model(model_config(), key=RngKey(1)), TOKENIZER)


class Echo:
    """Shows a task, then what was said, twice; rewards the length of what was said."""

    name = "echo"

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, seed: int) -> str:
        return f"task {seed}:"

    def step(self, action: str) -> StepResult:
        self.turns += 1
        return StepResult(
            observation=f"<{action}>",
            reward=float(len(action)),
            done=self.turns == 3,
            info={"turn": self.turns},
        )


def play(llm: LLM, tasks: list[int], samples: int = 2, max_turns: int = 5) -> list[Rollout]:
    return play_together(
        llm,
        Echo,
        tasks,
        samples=samples,
        rule=RULE,
        sampling=SAMPLING,
        key=RngKey(7),
        max_turns=max_turns,
    )


def test_tokens_are_observations_and_actions_in_turn(llm: LLM) -> None:
    rollouts = play(llm, [3, 4])
    assert [(r.task, r.sample) for r in rollouts] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    for rollout in rollouts:
        episode = rollout.episode
        assert len(episode.observations) == len(episode.actions) == 3
        assert rollout.reward == sum(len(action) for action in episode.actions)
        assert [info["turn"] for info in episode.info] == [1, 2, 3]
        runs = split(rollout)
        assert [own for own, _ in runs] == [False, True] * 3
        for observation, (_, tokens) in zip(episode.observations, runs[::2], strict=True):
            assert tokens == TOKENIZER.encode(observation)
        for action, (_, tokens) in zip(episode.actions, runs[1::2], strict=True):
            assert 1 <= len(tokens) <= 4
            if "\ufffd" not in TOKENIZER.decode(tokens):  # bytes that make a text
                assert TOKENIZER.decode(tokens) == action
        for own, logprob in zip(rollout.own, rollout.logprobs, strict=True):
            assert (logprob < 0) == own
        assert rollout.response_length == sum(len(tokens) for own, tokens in runs if own)


def split(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    """Runs of tokens of one author."""
    runs: list[tuple[bool, list[int]]] = []
    for token, own in zip(rollout.tokens, rollout.own, strict=True):
        if not runs or runs[-1][0] != own:
            runs.append((own, []))
        runs[-1][1].append(token)
    return runs


def test_an_episode_does_not_depend_on_the_others(llm: LLM) -> None:
    together = play(llm, [1, 2, 3], samples=3)
    assert len({rollout.tokens for rollout in together}) == 9
    alone = play(llm, [2], samples=2)
    for a, b in zip(alone, together[3:5], strict=True):
        assert (a.tokens, a.own, a.episode) == (b.tokens, b.own, b.episode)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_too_long_an_episode_is_cut_off_with_its_rewards(llm: LLM) -> None:
    whole, cut = play(llm, [5])[0], play(llm, [5], max_turns=2)[0]
    assert cut.episode.rewards == whole.episode.rewards[:2]
    assert cut.own[-1]  # no observation that nobody answers
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_each_episode_has_its_own_environment(llm: LLM) -> None:
    """Single-turn and multi-turn ones of the package, over many tasks at once."""
    for name, most in (("chain_sum", 1), ("count_on", 1), ("guess_number", 4)):
        rollouts = play_together(
            llm,
            lambda name=name: make_environment(name),
            range(20),
            samples=1,
            rule=RULE,
            sampling=SAMPLING,
            key=RngKey(1),
            max_turns=8,
        )
        prompts = [make_environment(name).reset(task) for task in range(20)]
        assert [rollout.episode.observations[0] for rollout in rollouts] == prompts
        assert {len(rollout.episode.actions) for rollout in rollouts} <= set(range(1, most + 1))


def test_nothing_to_play(llm: LLM) -> None:
    assert play(llm, []) == []

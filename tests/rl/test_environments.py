import io
import json
import math
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mcore_rl import EpisodeError, StepResult, make_environment, play
from mcore_rl.cli import main


def answer(observations: tuple[str, ...], actions: tuple[str, ...]) -> str:
    return f"that is {eval(observations[-1].rstrip('= '))}"


def binary_search(observations: tuple[str, ...], actions: tuple[str, ...]) -> str:
    low, high = 1, 15
    for guess, hint in zip(actions, observations[1:], strict=True):
        low, high = (int(guess) + 1, high) if hint == "Higher." else (low, int(guess) - 1)
    return str((low + high) // 2)


@pytest.mark.parametrize("terms", [1, 2, 5])
@pytest.mark.parametrize("digits", [1, 3])
def test_chain_sum_rewards_the_right_number_only(terms: int, digits: int) -> None:
    environment = make_environment("chain_sum", terms=terms, digits=digits)
    for seed in range(20):
        assert play(environment, answer, seed).total_reward == 1
        assert play(environment, lambda o, a: answer(o, a) + "7", seed).total_reward == 0
        assert play(environment, lambda o, a: "no idea", seed).total_reward == 0


def test_a_task_is_a_function_of_its_seed() -> None:
    prompts = [make_environment("chain_sum", digits=3).reset(seed) for seed in range(30)]
    assert prompts == [make_environment("chain_sum", digits=3).reset(seed) for seed in range(30)]
    assert len(set(prompts)) > 25


def test_multi_turn_episode() -> None:
    environment = make_environment("guess_number")
    for seed in range(20):
        episode = play(environment, binary_search, seed)
        assert episode.total_reward == 1
        assert len(episode.actions) == len(episode.observations) == len(episode.rewards) <= 4
        lost = play(environment, lambda o, a: "hm", seed)
        assert (lost.total_reward, len(lost.actions)) == (0, 4)


def test_stepping_outside_an_episode() -> None:
    for name in ("chain_sum", "guess_number"):
        environment = make_environment(name)
        with pytest.raises(RuntimeError, match="call reset"):
            environment.step("1")


def test_play_ends_an_endless_episode() -> None:
    class Endless:
        name = "endless"

        def reset(self, seed: int) -> str:
            return "?"

        def step(self, action: str) -> StepResult:
            return StepResult(observation="?", reward=0.0, done=False)

    with pytest.raises(RuntimeError, match="not over after 3 turns"):
        play(Endless(), lambda o, a: "!", 0, max_turns=3)


class Faulty:
    """Fails in the way that it is told."""

    name = "faulty"

    def __init__(self, reset: Any = "?", reward: Any = 0.0, observation: Any = "") -> None:
        self.shown, self.reward, self.observation = reset, reward, observation

    def reset(self, seed: int) -> str:
        return cast(str, _said(self.shown))

    def step(self, action: str) -> StepResult:
        if self.reward is StepResult:
            return cast(StepResult, 1.0)
        return StepResult(observation=self.observation, reward=_said(self.reward), done=True)


class RefusalError(Exception):
    """Cannot be made again from what it says, as errors of HTTP clients cannot."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}\n{body}")


def _said(what: Any) -> Any:
    if isinstance(what, Exception):
        raise what
    return what


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"reset": RefusalError(503, "down")},
            r"task 7: reset raised RefusalError: 503 down \(test_env.*:\d+",
        ),
        ({"reset": ""}, "task 7: reset returned '', which is no text"),
        ({"reset": None}, "task 7: reset returned None, which is no text"),
        (
            {"reward": RefusalError(503, "down")},
            r"task 7: step\('!'\) raised RefusalError: 503 down \(test_",
        ),
        ({"reward": ValueError("a\nb")}, r"raised ValueError: a b \(test_environments\.py:\d+\)"),
        ({"reward": math.nan}, "reward nan, which is no finite number"),
        ({"reward": -math.inf}, "reward -inf, which is no finite number"),
        ({"reward": 1e300}, r"reward 1e\+300, which is no finite number of fp32"),
        ({"reward": None}, "reward None, which is no"),
        ({"reward": "1"}, "reward '1', which is no"),
        ({"reward": [1.0]}, r"reward \[1.0\], which is no"),
        ({"reward": StepResult}, "returned 1.0, which is no StepResult"),
        ({"observation": None}, "observation None, which is no text"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_task_and_the_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EpisodeError, match=message) as caught:
        play(Faulty(**options), lambda o, a: "!", 7)
    assert str(caught.value).startswith("environment faulty, task 7: ")
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("reward", [True, 2, torch.tensor(1.5), torch.tensor([1.5]).numpy()[0]])
def test_rewards_are_floats_whatever_number_they_were(reward: Any) -> None:
    rewards = play(Faulty(reward=reward), lambda o, a: "!", 7).rewards
    assert rewards == (float(reward),)
    assert type(rewards[0]) is float


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 0}, "terms=0"),
        ("chain_sum", {"term": 1}, "no option 'term': did you mean 'terms'"),
        ("chain_sum", {"terms": "two"}, r"chain_sum\(terms='two'\): "),
    ],
)
def test_wrong_environment(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment(name, **options)


def test_a_file_that_is_not_on_the_path_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"No module named 'my_rewards'$"):
        make_environment("my_rewards:Mine")
    (tmp_path / "my_rewards.py").touch()
    with pytest.raises(ValueError, match=r"but there is my_rewards\.py: run with PYTHONPATH=\."):
        make_environment("my_rewards:Mine")


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments"]) == 0
    assert "chain_sum" in capsys.readouterr().out
    question = make_environment("chain_sum", terms=3).reset(5)
    monkeypatch.setattr("sys.stdin", io.StringIO(answer((question,), ()) + "\n"))
    assert main(["play", "chain_sum", "--seed", "5", "--option", "terms=3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == question
    assert json.loads(out[1])["reward"] == 1.0
    assert main(["play", "chess"]) == 2
    assert capsys.readouterr().err.startswith("mcore-rl: no environment 'chess'")

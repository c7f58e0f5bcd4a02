"""Small configs and models for the tests of mcore-rl."""

from typing import Any

from mcore_models import ModelConfig, llama
from mcore_rl import RLConfig, StepResult, config_from_tree
from mcore_rl.tasks import training_task

VOCABULARY = 257  # the byte tokenizer's, odd: padded under tp 2


def model_config(**fields: Any) -> ModelConfig:
    # Wide initial values, so that the next token depends on all before.
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 16, "init_std": 0.3}
    return llama(**{"vocab_size": VOCABULARY, **shape, **fields})


class Evenness:
    """Rewards the share of even characters: a model that knows nothing gets about a half of it.

    Two turns, so that sequences differ in length and hold text that is not the policy's.
    """

    name = "evenness"

    def __init__(self, *, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, seed: int) -> str:
        self.left = self.turns
        return "go" + "!" * (seed % 4)

    def step(self, action: str) -> StepResult:
        self.left -= 1
        even = sum(ord(character) % 2 == 0 for character in action)
        done = not self.left or not action
        return StepResult(
            observation="" if done else "on", reward=even / max(len(action), 1), done=done
        )


class Broken(Evenness):
    """Fails at the last task of the first step, which the second engine of two plays."""

    name = "broken"

    def reset(self, seed: int) -> str:
        if seed == training_task(5, 3):
            raise ValueError("this task is broken")
        return super().reset(seed)


def tree(**sections: Any) -> dict[str, Any]:
    """A run of three steps; `sections` replace values or extend mappings."""
    base: dict[str, Any] = {
        "steps": 3,
        "seed": 5,
        "environment": {"name": "small_runs:Evenness"},
        "model": {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "ffn_size": 16,
            "init_std": 0.3,
        },
        "rollout": {"group_size": 4, "max_tokens": 3, "max_turns": 4},
        "batch": {"global_size": 16, "micro_size": 4},
        "optimizer": {"eps": 1e-4, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "lr": 2e-3},
        "evaluate": {"tasks": 4},
        "log": {"progress": False, "tensorboard": False},
        "device": "cpu",
    }
    for name, value in sections.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and name in base else value
    return base


def config(**sections: Any) -> RLConfig:
    return config_from_tree(tree(**sections))

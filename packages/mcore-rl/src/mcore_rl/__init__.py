"""Reinforcement learning on the same models: environments, advantages, algorithms."""

from mcore_rl.advantages import AdvantageKind, group_advantages
from mcore_rl.environments import (
    Environment,
    Episode,
    Policy,
    StepResult,
    make_environment,
    play,
)

__all__ = [
    "AdvantageKind",
    "Environment",
    "Episode",
    "Policy",
    "StepResult",
    "group_advantages",
    "make_environment",
    "play",
]

"""Environments: the protocol, episodes, and small ones to start with."""

from mcore_rl.environments.base import (
    Environment,
    Episode,
    EpisodeError,
    Policy,
    StepResult,
    play,
)
from mcore_rl.environments.chain_sum import ChainSum
from mcore_rl.environments.count_on import CountOn
from mcore_rl.environments.guess_number import GuessNumber
from mcore_rl.environments.registry import ENVIRONMENTS, make_environment

__all__ = [
    "ENVIRONMENTS",
    "ChainSum",
    "CountOn",
    "Environment",
    "Episode",
    "EpisodeError",
    "GuessNumber",
    "Policy",
    "StepResult",
    "make_environment",
    "play",
]

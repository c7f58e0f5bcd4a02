"""Reinforcement learning on the same models: environments, rollouts, policy losses, training."""

from mcore_rl.advantages import AdvantageKind, group_advantages
from mcore_rl.batch import PolicyBatch, micro_batches, policy_batch
from mcore_rl.config import (
    EnvironmentConfig,
    HeldOutConfig,
    RLConfig,
    RolloutBatchConfig,
    RolloutConfig,
    StepLogConfig,
)
from mcore_rl.engines import RolloutEngines
from mcore_rl.environments import (
    Environment,
    Episode,
    EpisodeError,
    Policy,
    StepResult,
    make_environment,
    play,
)
from mcore_rl.load import config_from_tree, load_config, recipe_names
from mcore_rl.log_probs import LogProbKind, LogProbs
from mcore_rl.losses import (
    Aggregation,
    GRPOLoss,
    PolicyCounts,
    PolicyLoss,
    PolicyLossInput,
    PolicyLossOutput,
)
from mcore_rl.objective import PolicyObjective, token_log_probs
from mcore_rl.reference import ReferencePolicy
from mcore_rl.rollout import Rollout, play_together
from mcore_rl.step import PolicyStep
from mcore_rl.tasks import Tasks, held_out_tasks
from mcore_rl.train import RLSummary, check_run, run_rank, train

__all__ = [
    "AdvantageKind",
    "Aggregation",
    "Environment",
    "EnvironmentConfig",
    "Episode",
    "EpisodeError",
    "GRPOLoss",
    "HeldOutConfig",
    "LogProbKind",
    "LogProbs",
    "Policy",
    "PolicyBatch",
    "PolicyCounts",
    "PolicyLoss",
    "PolicyLossInput",
    "PolicyLossOutput",
    "PolicyObjective",
    "PolicyStep",
    "RLConfig",
    "RLSummary",
    "ReferencePolicy",
    "Rollout",
    "RolloutBatchConfig",
    "RolloutConfig",
    "RolloutEngines",
    "StepLogConfig",
    "StepResult",
    "Tasks",
    "check_run",
    "config_from_tree",
    "group_advantages",
    "held_out_tasks",
    "load_config",
    "make_environment",
    "micro_batches",
    "play",
    "play_together",
    "policy_batch",
    "recipe_names",
    "run_rank",
    "token_log_probs",
    "train",
]

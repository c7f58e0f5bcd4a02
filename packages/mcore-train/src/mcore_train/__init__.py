"""The training loop, optimizers, recipes, parity and the quickstart."""

from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.config import (
    EvaluateConfig,
    LogConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    WorldPlan,
)
from mcore_train.data_config import BatchConfig, DataConfig
from mcore_train.load import config_from_tree, config_to_tree, load_config, recipe_names
from mcore_train.pretrain import RunSummary, check_run, default_callbacks, pretrain, run_rank
from mcore_train.schedules import learning_rate
from mcore_train.session import Session, build_session
from mcore_train.step import Step, StepMetrics, evaluate
from mcore_train.trainer import Trainer

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DataConfig",
    "EvaluateConfig",
    "LogConfig",
    "LossConfig",
    "OptimizerConfig",
    "RunSummary",
    "ScheduleConfig",
    "Session",
    "Step",
    "StepMetrics",
    "TrainConfig",
    "Trainer",
    "WorldPlan",
    "build_session",
    "check_run",
    "config_from_tree",
    "config_to_tree",
    "default_callbacks",
    "evaluate",
    "learning_rate",
    "load_config",
    "pretrain",
    "recipe_names",
    "run_rank",
]
